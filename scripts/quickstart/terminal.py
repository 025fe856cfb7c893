"""The messages that Terminus-2 sends to the model, with a simulated terminal screen. No commands are run."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PROMPT = "root@sandbox:/app#"
HEIGHT = 40
CONFIRMATION = (
    "Are you sure you want to mark the task as complete? This will trigger your solution to be graded and "
    "you won't be able to "
    'make any further corrections. If so, include "task_complete": true in your JSON response again.'
)
NO_JSON = (
    "Previous response had parsing errors:\nERROR: No valid JSON found in response\n"
    "WARNINGS: - No valid JSON object found\n\n"
    "Please fix these issues and provide a proper JSON response."
)


@cache
def prompt_template() -> str:
    """Return the template of the first message of Terminus-2, from the installed Harbor."""
    harbor = importlib.util.find_spec("harbor")
    assert harbor is not None and harbor.origin is not None
    return (Path(harbor.origin).parent / "agents/terminus_2/templates/terminus-json-plain.txt").read_text(
        encoding="utf-8"
    )


@dataclass(kw_only=True)
class Screen:
    """A tmux pane as Terminus-2 captures it. The last element of `rows` is the line with the cursor."""

    rows: list[str] = field(default_factory=list)
    observed: str | None = None  # the buffer at the last observation; None: not observed yet

    def show_prompt(self) -> None:
        self.rows.append(PROMPT)

    def type(self, keys: str, output: list[str]) -> None:
        """Type `keys`. If they end with a newline, the command runs and prints `output`."""
        if not self.rows:
            self.show_prompt()
        self.rows[-1] += (" " if self.rows[-1] == PROMPT else "") + keys.rstrip("\n")
        if keys.endswith("\n"):
            self.rows += [*output, PROMPT]

    def observe(self) -> str:
        """Return the new output in the format of Harbor's `TmuxSession.get_incremental_output`."""
        rows = [row.rstrip() for row in self.rows]
        buffer = "\n".join(rows + [""] * (HEIGHT - len(rows))) + "\n"
        previous, self.observed = self.observed, buffer
        if previous is None:
            return f"Current Terminal Screen:\n{buffer}"
        before = previous.strip()
        assert before in buffer, "the simulated screen cannot scroll"
        new = buffer[before.rfind("\n") if "\n" in before else buffer.index(before) :]
        return f"New Terminal Output:\n{new}"


def first_message(instruction: str, observation: str) -> str:
    return prompt_template().format(instruction=instruction, terminal_state=observation)


def confirmation_message(observation: str) -> str:
    return f"Current terminal state:\n{observation}\n\n{CONFIRMATION}"
