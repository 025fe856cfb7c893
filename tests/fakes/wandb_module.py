"""A fake `wandb` module that does not use the network."""

from __future__ import annotations

import threading
import types


class FakeWandb(types.ModuleType):
    """Records the ids of all runs in `ids` and the arguments (step, metrics) of `log` in `logged`.

    `init` raises `Error` if `is_down` is true. `finish` waits up to 10 seconds for the event `released`.
    """

    Error = RuntimeError

    def __init__(self, *, is_down=False):
        super().__init__("wandb")
        self.ids = []
        self.logged = []
        self.is_down = is_down
        self.released = threading.Event()

    def Settings(self, **options):
        return options

    def init(self, *, id, **options):
        self.ids.append(id)
        if self.is_down:
            raise self.Error("no network\nlong story")
        return self

    def log(self, metrics, *, step, commit):
        self.logged.append((step, metrics))

    def finish(self):
        self.released.wait(10)
