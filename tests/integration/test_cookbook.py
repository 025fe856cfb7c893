"""Tests of `python -m scripts.cookbook` that run no recipe, because recipes take minutes and need torch."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cookbook.__main__ import kill_once_saved, lines, main, options_of
from scripts.cookbook.material import TrainingConversations, build_tokenizer, write_data_sets
from scripts.cookbook.recipes import KL, NLL, RECIPES, REWARD, at_most, every_step, falls, rises
from scripts.quickstart.build_model import ROW_LENGTH, encode


def test_rises_and_falls_judge_the_trend_of_a_metric() -> None:
    metrics = [{REWARD: value} for value in (0.1, 0.2, 0.2, 0.1, 0.4, 0.3, 0.5, 0.6)]
    assert rises(REWARD)(metrics) == ("reward/total 0.150 -> 0.550", True)
    assert not falls(REWARD)(metrics)[1]
    assert not rises(REWARD)([{REWARD: 0.5}])[1]  # one step shows no trend
    assert not rises(REWARD)([{REWARD: 0.0}] * 8)[1]


def test_a_limit_applies_to_every_step_and_needs_a_step() -> None:
    assert at_most(KL, 2e-4)([{KL: 1e-4}, {KL: -1.5e-4}])[1]
    assert not at_most(KL, 2e-4)([{KL: 1e-8}, {KL: -3e-4}])[1]
    assert not at_most(KL, 2e-4)([{REWARD: 1.0}])[1]


@pytest.mark.parametrize(
    ("steps", "passes"),
    [([0, 1, 2, 2, 3], True), ([0, 1, 3], False), ([0, 1, 2, 0, 1, 2, 3], False), ([], False)],
)
def test_a_resumed_run_starts_once_and_misses_no_step(steps: list[int], passes: bool) -> None:
    assert every_step([{"step": step, NLL: 1.0} for step in steps])[1] is passes


def test_a_run_is_killed_only_after_it_has_saved(tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'checkpoints.jsonl')!r}, 'w').write('{{}}\\n{{')"
    assert not kill_once_saved(subprocess.Popen([sys.executable, "-c", "pass"], text=True), tmp_path)
    assert kill_once_saved(
        subprocess.Popen([sys.executable, "-c", f"{program}; import time; time.sleep(600)"], text=True),
        tmp_path,
    )
    assert lines(tmp_path / "checkpoints.jsonl") == [{}]  # an incomplete line is not read


def test_a_student_is_given_its_teachers_last_checkpoint(tmp_path: Path) -> None:
    (student,) = (recipe for recipe in RECIPES if recipe.teacher)
    with pytest.raises(SystemExit, match=f"run {student.teacher} with the same work=DIR first"):
        options_of(student, tmp_path)
    (tmp_path / str(student.teacher)).mkdir()
    saved = [{"sampler_path": f"tinker://run/sampler_weights/{name}"} for name in ("000004", "final")]
    (tmp_path / str(student.teacher) / "checkpoints.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in saved)
    )
    assert options_of(student, tmp_path)[-1] == "teacher_checkpoint=tinker://run/sampler_weights/final"


def test_unknown_names_are_refused_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["math_rll", "wrok=/x"]) == 2
    assert (
        "unknown math_rll, wrok; options: work, venv, torch; recipes: math_rl, math_rl_async"
        in capsys.readouterr().err
    )


def test_data_sets_are_found_under_their_hub_names(tmp_path: Path) -> None:
    write_data_sets(tmp_path)
    cards = list(tmp_path.rglob("README.md"))
    for card in cards:
        listed = [line.split("path: ")[1] for line in card.read_text().splitlines() if "path: " in line]
        assert listed and all(lines(card.parent / file) for file in listed)
    assert len(cards) == 5
    question = lines(tmp_path / "openai/gsm8k/train.jsonl")[0]
    numbers = [int(word) for word in question["question"].split() if word.isdigit()]
    assert question["answer"] == f"#### {sum(numbers)}"


def test_conversations_fit_the_length_and_separate_digits(tmp_path: Path) -> None:
    """A conversation of more than ROW_LENGTH tokens would never be used for training."""
    tokenizer = build_tokenizer(tmp_path)
    conversations = itertools.islice(TrainingConversations(random.Random(0), evasive_share=1.0), 300)
    assert max(len(encode(tokenizer, messages)[0]) for messages in conversations) <= ROW_LENGTH
    text = "<|im_start|>user\nWhat is 100 + 7?<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert {tokenizer.id_to_token(token) for token in ids} >= {"<|im_start|>", "<|im_end|>", "1", "0", "7"}
