"""The quick start's world: solvable tasks, honest separation of training and evaluation, and a tokenizer that loses nothing."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts.quickstart.demonstrations import demonstrate
from scripts.quickstart.families import FAMILIES, TRAINING, UNSEEN, make_instance
from scripts.quickstart.make_tasks import ROOT, instances, main
from scripts.quickstart.terminal import HEIGHT, NO_JSON, PROMPT, Screen, confirmation_message, first_message
from scripts.quickstart.tokenizer import build_tokenizer
from scripts.quickstart.words import SYLLABLES, Pool, Words, pool_of
from src.envs.sandbox.bubblewrap import missing_programs
from src.policy.chat import Chat, load_chat

TASKS = sorted(path for split in ("train", "heldout") for path in (ROOT / split).iterdir())
MODEL_DIR = ROOT / "model"


@pytest.fixture(scope="module")
def chat() -> Chat:
    return load_chat(str(MODEL_DIR))


def made_up(text: str) -> set[str]:
    """The invented words and the numbers of three or more digits in a text."""
    syllables = "|".join(SYLLABLES)
    words = set(re.findall(rf"(?<![a-z])(?:{syllables}){{2,3}}(?![a-z])|(?<!\d)\d{{3,4}}(?!\d)", text))
    return words - {
        "file",
        "name",
        "make",
        "save",
        "line",
        "move",
        "take",
        "mode",
        "remove",
        "rename",
        "delete",
    }


def test_the_committed_tasks_are_what_the_generator_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_tasks", str(tmp_path)])
    main()
    for split in ("train", "heldout"):
        fresh = {
            path.relative_to(tmp_path): path.read_bytes()
            for path in (tmp_path / split).rglob("*")
            if path.is_file()
        }
        committed = {
            path.relative_to(ROOT): path.read_bytes() for path in (ROOT / split).rglob("*") if path.is_file()
        }
        assert fresh == committed


def test_about_a_quarter_is_held_out_with_whole_families() -> None:
    families = {
        split: {
            tomllib.loads((t / "task.toml").read_text())["metadata"]["family"]
            for t in (ROOT / split).iterdir()
        }
        for split in ("train", "heldout")
    }
    held_out = len(list((ROOT / "heldout").iterdir()))
    assert len(TASKS) >= 48 and 0.2 <= held_out / len(TASKS) <= 0.35
    assert families["train"] == set(TRAINING) and len(families["train"]) >= 10
    assert families["heldout"] - families["train"] == set(UNSEEN) and len(UNSEEN) >= 2


def test_no_python_file_lies_below_datasets() -> None:
    assert not list(ROOT.parent.rglob("*.py"))


def test_evaluation_shares_no_word_number_or_instruction_with_training() -> None:
    """Every demonstration and training task draws from one pool by construction; here the texts themselves are compared."""
    rng = random.Random("leak check")
    training = [instance.instruction for instance in instances(Pool.TRAIN).values()]
    text = "\n".join(training)
    for number in range(3000):
        instance = make_instance(rng.choice(tuple(TRAINING)), seed=f"demonstration-{number}", pool=Pool.TRAIN)
        training.append(instance.instruction)
        text += "\n".join(
            [
                instance.instruction,
                *instance.files,
                *instance.files.values(),
                *(m.content for m in demonstrate(instance, rng).messages[1:]),
            ]
        )
    held_out = instances(Pool.HELD_OUT).values()
    seen = made_up(text)
    assert len(seen) > 3000
    assert not seen & made_up(
        "\n".join("\n".join([i.instruction, *i.files, *i.files.values()]) for i in held_out)
    )
    assert not set(training) & {instance.instruction for instance in held_out}


def test_every_word_belongs_to_exactly_one_pool() -> None:
    for pool in Pool:
        words = Words(random=random.Random(7), pool=pool, used=set())
        assert all(pool_of(words.word()) is pool for _ in range(200))


def test_demonstrations_never_combine_operations_as_the_held_out_families_do() -> None:
    for number in range(2000):
        command = make_instance("pipe", seed=f"demonstration-{number}", pool=Pool.TRAIN).command
        assert not re.search(r"grep .*\| wc", command)
        assert not re.search(
            r"tail .*>>", make_instance("collect", seed=f"demonstration-{number}", pool=Pool.TRAIN).command
        )
        pair = make_instance("pair", seed=f"demonstration-{number}", pool=Pool.TRAIN).command
        assert not re.search(r"^mkdir .*&& echo .*>>|^rm .*&& cp|^mv .*&& chmod \d", pair)


@pytest.mark.skipif(bool(missing_programs()), reason="needs bubblewrap")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_solution_scores_one_and_doing_nothing_zero(family: str, tmp_path: Path) -> None:
    tasks = [
        task
        for task in TASKS
        if tomllib.loads((task / "task.toml").read_text())["metadata"]["family"] == family
    ]
    assert tasks
    for task in tasks:
        assert graded(task, "bash /solution/solve.sh", tmp_path / task.name / "solved") == "1"
        assert graded(task, "true", tmp_path / task.name / "idle") == "0"


def graded(task: Path, command: str, directory: Path) -> str:
    """Run `command` on the task's files in a throwaway sandbox, then its verifier; the reward written."""
    for name in ("app", "logs/verifier"):
        (directory / name).mkdir(parents=True)
    if (task / "environment/files").is_dir():
        subprocess.run(["cp", "-r", f"{task}/environment/files/.", directory / "app"], check=True)
    system = [
        option
        for name in ("bin", "lib", "lib64")
        if os.path.exists(f"/{name}")
        for option in ("--ro-bind", os.path.realpath(f"/{name}"), f"/{name}")
    ]
    mounts = [
        "--ro-bind",
        "/usr",
        "/usr",
        *system,
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--bind",
        directory / "app",
        "/app",
        "--bind",
        directory / "logs",
        "/logs",
    ]
    mounts += ["--ro-bind", task / "solution", "/solution", "--ro-bind", task / "tests", "/tests"]
    subprocess.run(
        [
            "bwrap",
            *mounts,
            "--unshare-all",
            "--die-with-parent",
            "bash",
            "-c",
            f"{command}; bash /tests/test.sh",
        ],
        check=True,
        timeout=30,
    )
    return (directory / "logs/verifier/reward.txt").read_text().strip()


def test_the_committed_tokenizer_is_what_the_builder_makes() -> None:
    assert build_tokenizer().to_str(pretty=True) == (MODEL_DIR / "tokenizer.json").read_text()


def test_whole_conversations_survive_encoding_and_stay_short(chat: Chat) -> None:
    rng = random.Random("round trip")
    lengths = []
    for number in range(300):
        instance = make_instance(
            rng.choice(tuple(FAMILIES)), seed=f"round-trip-{number}", pool=rng.choice(tuple(Pool))
        )
        messages = [{"role": m.role, "content": m.content} for m in demonstrate(instance, rng).messages]
        ids = chat.render(messages[:-1])
        assert chat.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        ).endswith(str(messages[-2]["content"]) + "<|im_end|>\n<|im_start|>assistant\n")
        lengths.append(len(ids))
    assert sum(lengths) / len(lengths) < 150


def test_names_are_split_into_syllables_wherever_they_stand(chat: Chat) -> None:
    words = Words(random=random.Random(3), pool=Pool.HELD_OUT, used=set())
    for _ in range(200):
        word = words.word()
        pieces = [word[start : start + 2] for start in range(0, len(word), 2)]
        for before in (" ", "/", "s/"):
            text = f"{before}{word}.txt"
            decoded = [
                chat.tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False)
                for i in chat.tokenizer.encode(text, add_special_tokens=False)
            ]
            assert decoded[-len(pieces) - 1 :] == [*pieces, ".txt"]


def test_the_screen_is_predicted_as_tmux_shows_it() -> None:
    screen = Screen()
    screen.show_prompt()
    assert screen.observe() == "Current Terminal Screen:\n" + PROMPT + "\n" * HEIGHT
    screen.type("ls\n", ["kolaru.txt"])
    assert screen.observe() == f"New Terminal Output:\n{PROMPT} ls\nkolaru.txt\n{PROMPT}" + "\n" * (
        HEIGHT - 2
    )


@pytest.mark.skipif(bool(missing_programs()), reason="needs bubblewrap and tmux")
def test_the_model_is_trained_on_the_prompts_that_terminus_2_sends(chat: Chat, tmp_path: Path) -> None:
    """A malformed answer, a command without newline, its repair: the real agent in a real sandbox says what demonstrations predict."""
    from scripts.quickstart.demonstrations import answer
    from src.config import TrainerConfig
    from src.core.trajectory import StopReason, Trajectory, Turn
    from src.envs.harbor.environment import open_harbor
    from src.policy.sampling_policy import SampleRequest

    options = {"environment_type": "sandbox", "max_turns": 4, "enable_summarize": False, "eval_split": 0.0}
    source = open_harbor(
        TrainerConfig(model_name="quickstart/tiny", tasks_dir=str(ROOT / "train"), **options), chat
    )
    task = next(task for task in source.train if task.id.endswith("append-01"))
    command = (task.path / "solution/solve.sh").read_text().splitlines()[2]
    answers = [
        answer("a", "b", "x").replace('", "duration"', ', "duration"'),
        answer("a", "b", command),
        answer("a", "b", "\n"),
    ]
    prompts: list[str] = []

    class Scripted:
        version = 0

        async def sample(self, request: SampleRequest) -> Turn:
            prompts.append(
                chat.tokenizer.decode(
                    request.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            )
            ids = [
                *chat.tokenizer.encode(answers[len(prompts) - 1], add_special_tokens=False),
                chat.turn_end_id,
            ]
            return Turn(
                prompt_ids=request.prompt_ids,
                completion_ids=ids,
                logprobs=[0.0] * len(ids),
                stop_reason=StopReason.STOP,
                policy_version=0,
            )

    result = asyncio.run(source.trial(task, directory=tmp_path, seed=0, temperature=1.0).run(Scripted()))
    assert isinstance(result, Trajectory) and result.reward == 1.0
    screen = Screen()
    if PROMPT in prompts[0]:  # else the shell was slower than the first look, as in some demonstrations
        screen.show_prompt()
    instruction = (task.path / "instruction.md").read_text()
    messages = [{"role": "user", "content": first_message(instruction, screen.observe())}]
    messages += [
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": NO_JSON},
        {"role": "assistant", "content": answers[1]},
    ]
    screen.type(command, [])
    messages += [{"role": "user", "content": confirmation_message(screen.observe())}]
    rendered = chat.tokenizer.decode(
        chat.render(messages), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert prompts[-1] == rendered
