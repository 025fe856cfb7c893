"""Tests the data of the quick start: solvable tasks, held-out tasks that share no invented words with
training, and a lossless tokenizer.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts.quickstart.arguments import directory_and_options
from scripts.quickstart.demonstrations import demonstrate
from scripts.quickstart.make_tasks import ROOT, instances, main
from scripts.quickstart.task_types import TASK_TYPES, TRAINING, UNSEEN, make_instance
from scripts.quickstart.terminal import HEIGHT, NO_JSON, PROMPT, Screen, confirmation_message, first_message
from scripts.quickstart.tokenizer import build_tokenizer
from scripts.quickstart.words import SYLLABLES, Pool, Words, pool_of
from src.envs.sandbox.bubblewrap import missing_packages
from src.policy.chat import Chat, load_chat

TASKS = sorted(path for split in ("train", "heldout") for path in (ROOT / split).iterdir())
MODEL_DIR = ROOT / "model"


@pytest.fixture(scope="module")
def chat() -> Chat:
    return load_chat(str(MODEL_DIR))


def invented_words(text: str) -> set[str]:
    """Return the invented words and the numbers of three or four digits in a text."""
    syllables = "|".join(SYLLABLES)
    words = set(re.findall(rf"(?<![a-z])(?:{syllables}){{2,3}}(?![a-z])|(?<!\d)\d{{3,4}}(?!\d)", text))
    english = "file name make save line move take mode remove rename delete"
    return words - set(english.split())


def test_the_generator_reproduces_the_committed_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_tasks", str(tmp_path)])
    main()
    for split in ("train", "heldout"):
        written = {
            path.relative_to(tmp_path): path.read_bytes()
            for path in (tmp_path / split).rglob("*")
            if path.is_file()
        }
        committed = {
            path.relative_to(ROOT): path.read_bytes() for path in (ROOT / split).rglob("*") if path.is_file()
        }
        assert written == committed


def task_types(split: str) -> set[str]:
    tasks = (ROOT / split).iterdir()
    return {tomllib.loads((task / "task.toml").read_text())["metadata"]["family"] for task in tasks}


def test_about_a_quarter_of_the_tasks_is_held_out() -> None:
    num_held_out = len(list((ROOT / "heldout").iterdir()))
    assert len(TASKS) >= 48 and 0.2 <= num_held_out / len(TASKS) <= 0.35


def test_training_has_its_task_types() -> None:
    assert task_types("train") == set(TRAINING) and len(TRAINING) >= 10


def test_whole_task_types_are_held_out() -> None:
    assert task_types("heldout") - task_types("train") == set(UNSEEN) and len(UNSEEN) >= 2


def test_datasets_contains_no_python_file() -> None:
    assert not list(ROOT.parent.rglob("*.py"))


@pytest.fixture(scope="module")
def training_texts() -> tuple[set[str], str]:
    """Return the instructions of training tasks and demonstrations, and all their text."""
    rng = random.Random("leak check")
    instructions = {instance.instruction for instance in instances(Pool.TRAIN).values()}
    texts = [*instructions]
    for number in range(3000):
        instance = make_instance(rng.choice(tuple(TRAINING)), seed=f"demonstration-{number}", pool=Pool.TRAIN)
        instructions.add(instance.instruction)
        texts += [instance.instruction, *instance.files, *instance.files.values()]
        texts += [message.content for message in demonstrate(instance, rng).messages[1:]]
    return instructions, "\n".join(texts)


def test_held_out_tasks_share_no_instruction_with_training(training_texts: tuple[set[str], str]) -> None:
    held_out = {instance.instruction for instance in instances(Pool.HELD_OUT).values()}
    assert not training_texts[0] & held_out


def test_held_out_tasks_share_no_invented_word_with_training(training_texts: tuple[set[str], str]) -> None:
    held_out = instances(Pool.HELD_OUT).values()
    texts = [text for i in held_out for text in (i.instruction, *i.files, *i.files.values())]
    training_words = invented_words(training_texts[1])
    assert len(training_words) > 3000
    assert not training_words & invented_words("\n".join(texts))


def test_every_word_belongs_to_exactly_one_pool() -> None:
    for pool in Pool:
        words = Words(random=random.Random(7), pool=pool, used=set())
        assert all(pool_of(words.word()) is pool for _ in range(200))


def test_demonstrations_lack_combinations_of_held_out_types() -> None:
    for number in range(2000):
        command = make_instance("pipe", seed=f"demonstration-{number}", pool=Pool.TRAIN).command
        assert not re.search(r"grep .*\| wc", command)
        assert not re.search(
            r"tail .*>>", make_instance("collect", seed=f"demonstration-{number}", pool=Pool.TRAIN).command
        )
        pair = make_instance("pair", seed=f"demonstration-{number}", pool=Pool.TRAIN).command
        assert not re.search(r"^mkdir .*&& echo .*>>|^rm .*&& cp|^mv .*&& chmod \d", pair)


@pytest.mark.skipif(bool(missing_packages()), reason="needs bubblewrap")
@pytest.mark.parametrize("task_type", sorted(TASK_TYPES))
def test_only_the_solution_of_a_task_scores_1(task_type: str, tmp_path: Path) -> None:
    tasks = [
        task
        for task in TASKS
        if tomllib.loads((task / "task.toml").read_text())["metadata"]["family"] == task_type
    ]
    assert tasks
    for task in tasks:
        assert graded(task, "bash /solution/solve.sh", tmp_path / task.name / "solved") == "1"
        assert graded(task, "true", tmp_path / task.name / "idle") == "0"


def graded(task: Path, command: str, directory: Path) -> str:
    """Run `command` and then the verifier in a temporary sandbox with the task's files.

    Returns the text of the reward file.
    """
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
    mounts = ["--ro-bind", "/usr", "/usr", *system, "--proc", "/proc", "--dev", "/dev"]
    mounts += ["--bind", directory / "app", "/app", "--bind", directory / "logs", "/logs"]
    mounts += ["--ro-bind", task / "solution", "/solution", "--ro-bind", task / "tests", "/tests"]
    script = f"{command}; bash /tests/test.sh"
    subprocess.run(
        ["bwrap", *mounts, "--unshare-all", "--die-with-parent", "bash", "-c", script], check=True, timeout=30
    )
    return (directory / "logs/verifier/reward.txt").read_text().strip()


def test_the_builder_reproduces_the_committed_tokenizer() -> None:
    assert build_tokenizer().to_str(pretty=True) == (MODEL_DIR / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def conversations() -> list[list[dict[str, object]]]:
    rng = random.Random("round trip")
    conversations = []
    for number in range(300):
        task_type, pool = rng.choice(tuple(TASK_TYPES)), rng.choice(tuple(Pool))
        instance = make_instance(task_type, seed=f"round-trip-{number}", pool=pool)
        messages = demonstrate(instance, rng).messages
        conversations.append([{"role": message.role, "content": message.content} for message in messages])
    return conversations


def test_encoded_conversations_decode_exactly(
    chat: Chat, conversations: list[list[dict[str, object]]]
) -> None:
    for messages in conversations:
        decoded = chat.tokenizer.decode(
            chat.render(messages[:-1]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert decoded.endswith(f"{messages[-2]['content']}<|im_end|>\n<|im_start|>assistant\n")


def test_encoded_conversations_are_short(chat: Chat, conversations: list[list[dict[str, object]]]) -> None:
    lengths = [len(chat.render(messages[:-1])) for messages in conversations]
    assert sum(lengths) / len(lengths) < 150


def test_names_are_split_into_syllables_in_every_context(chat: Chat) -> None:
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


def test_the_first_screen_is_predicted() -> None:
    screen = Screen()
    screen.show_prompt()
    assert screen.observe() == "Current Terminal Screen:\n" + PROMPT + "\n" * HEIGHT


def test_the_output_of_a_command_is_predicted() -> None:
    screen = Screen()
    screen.show_prompt()
    screen.observe()
    screen.type("ls\n", ["kolaru.txt"])
    assert screen.observe() == f"New Terminal Output:\n{PROMPT} ls\nkolaru.txt\n{PROMPT}" + "\n" * (
        HEIGHT - 2
    )


@pytest.mark.skipif(bool(missing_packages()), reason="needs bubblewrap and tmux")
def test_demonstrations_have_the_prompts_of_terminus_2(chat: Chat, tmp_path: Path) -> None:
    """The real agent sends the predicted prompts after a malformed answer and after a command without a
    newline.
    """
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
    if PROMPT in prompts[0]:  # The first screen can precede the shell's prompt, as in some demonstrations.
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


def test_the_scripts_accept_a_directory_and_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script"])
    assert directory_and_options("usage", ROOT, ["steps"]) == (ROOT, {})
    monkeypatch.setattr("sys.argv", ["script", "steps=1", "directory"])
    assert directory_and_options("usage", ROOT, ["steps"]) == (Path("directory"), {"steps": "1"})


@pytest.mark.parametrize("arguments", [["step=100"], ["--steps=100"], ["-x"], ["one", "two"]])
def test_the_scripts_refuse_unknown_arguments(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script", *arguments])
    with pytest.raises(SystemExit, match=f"^unknown argument '{arguments[-1]}'; give at most one directory"):
        directory_and_options("usage", ROOT, ["steps"])


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_the_scripts_print_their_usage(argument: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["script", argument])
    with pytest.raises(SystemExit, match=r"^$"):
        directory_and_options("usage", ROOT)
    assert capsys.readouterr().out == "usage\n"
