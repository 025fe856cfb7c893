import pytest

from src.core.errors import ConfigError
from src.records.checkpoints import JOURNAL, Checkpoint, append, last


def checkpoint(batch):
    return Checkpoint(
        name=f"{batch:06d}",
        batch=batch,
        epoch=0,
        final=False,
        state_path=f"tinker://s/{batch}",
        sampler_path="tinker://w",
    )


def test_a_run_resumes_from_the_last_entry(tmp_path):
    assert last(tmp_path) is None
    append(tmp_path, checkpoint(2))
    append(tmp_path, checkpoint(4))
    assert last(tmp_path) == checkpoint(4)


def test_incomplete_lines_and_unknown_keys_are_ignored(tmp_path):
    append(tmp_path, checkpoint(2))
    journal = tmp_path / JOURNAL
    journal.write_text(journal.read_text().replace('{"name"', '{"note": "mine", "name"') + '{"name": "0000')
    assert last(tmp_path) == checkpoint(2)


def test_a_line_that_is_no_checkpoint_is_an_error(tmp_path):
    (tmp_path / JOURNAL).write_text('{"hello": 1}\n')
    with pytest.raises(ConfigError, match=r"checkpoints.jsonl, line 1: name: Field required"):
        last(tmp_path)
