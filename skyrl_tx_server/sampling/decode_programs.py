"""The decode programs that a background thread compiles.

An unrolled program contains every layer of the model, so its compilation time is proportional to the number
of layers. The width of a program is the number of sequences per data-parallel rank that it can decode. Until
an unrolled program is compiled, another program is used for the same sequences. On a CPU, the other program
samples the same tokens with the same logprobs. On a GPU, the last bits may differ. There are two cases:
- Instead of a narrow program, a wider program is used. The narrow program is compiled after several
  dispatches could have used it.
- Instead of the widest program, a rolled program is used, which contains a loop over the layers. Its
  compilation takes about as long as the compilation of a few layers.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from jax.stages import Compiled, Lowered

from skyrl_tx_server.sampling.decode_batch import DecodeProgram

USES_BEFORE_COMPILATION = 16
"""A narrow program is compiled after this number of dispatches could have used it, and not earlier, because
the compilation takes as long as many dispatches."""
MIN_ROLLED_LAYERS = 8
"""A model with fewer layers has no rolled programs, because its unrolled programs are compiled quickly."""
COMPILE_THREAD = "compile-decode"  # name of the thread that compiles

logger = logging.getLogger(__name__)


class DecodePrograms:
    """Compiles and holds decode programs. `lower` returns the lowered program to compile."""

    def __init__(self, lower: Callable[[DecodeProgram], Lowered]) -> None:
        self._lower = lower
        self._compiled: dict[DecodeProgram, Compiled] = {}
        self._uses = Counter[DecodeProgram]()
        self._thread: threading.Thread | None = None

    def get(self, program: DecodeProgram) -> Compiled | None:
        return self._compiled.get(program)

    def request(self, program: DecodeProgram, *, min_uses: int | None = None) -> Compiled | None:
        """Return the compiled program. If it is not compiled yet, count the request and return None. If this
        is at least request number `min_uses` (default: USES_BEFORE_COMPILATION) for the program, and no other
        program is being compiled, start the compilation."""
        if program in self._compiled:
            return self._compiled[program]
        self._uses[program] += 1
        busy = self._thread is not None and self._thread.is_alive()
        needed = USES_BEFORE_COMPILATION if min_uses is None else min_uses
        if self._uses[program] >= needed and not busy:
            self._uses[program] = -(2**31)  # a program that fails to compile is not compiled again
            # Python must wait for this thread before it exits, because the exit handlers of XLA crash during
            # a compilation. Without daemon=False, the thread would be a daemon like the engine's thread.
            self._thread = threading.Thread(
                target=self._compile, args=(program,), name=COMPILE_THREAD, daemon=False
            )
            self._thread.start()
        return None

    def wait(self) -> None:
        """Wait until no program is being compiled."""
        if self._thread is not None:
            self._thread.join()

    def _compile(self, program: DecodeProgram) -> None:
        logger.info("compiling the decode program for %d sequences per rank in the background", program.width)
        try:
            self._compiled[program] = self._lower(program).compile()
        except Exception as error:
            logger.warning(
                "cannot compile the decode program for %d sequences per rank; a slower program is used: %s",
                program.width,
                error,
            )
