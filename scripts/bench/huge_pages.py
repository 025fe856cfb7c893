"""Measure the time to fill new arrays on the CPU, with and without transparent huge pages.

    python -m scripts.bench.huge_pages [gib=2] [repeats=3]

Processes with and without huge pages run alternately. Each process fills arrays of `gib` GiB in total. The
table shows the median CPU seconds of the processes with each setting.
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

import chz

from skyrl_tx_server.config.huge_pages import REQUEST, VARIABLE

FILL = """
import sys, time
import jax, jax.numpy as jnp
jax.block_until_ready(jnp.zeros(8))
start, arrays = time.process_time(), []
for _ in range(int(sys.argv[1])):
    arrays.append(jax.block_until_ready(jnp.zeros(2**28, jnp.float32)))
print(time.process_time() - start)
"""
SETTINGS = {"pages of 4 KiB": "glibc.malloc.hugetlb=0", "huge pages": REQUEST}


@chz.chz
class Options:
    gib: int = chz.field(default=2, doc="Total size in GiB of the arrays that each process fills")
    repeats: int = chz.field(default=3, doc="Number of processes for each setting")


def seconds_to_fill(setting: str, gib: int) -> float:
    """Return the CPU seconds in which a new process fills arrays of `gib` GiB."""
    environment = os.environ | {VARIABLE: setting, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FILL, str(gib)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(options: Options) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(options.repeats):
        for name, setting in SETTINGS.items():
            seconds[name].append(seconds_to_fill(setting, options.gib))
    small_pages, huge_pages = (median(values) for values in seconds.values())
    for name, values in seconds.items():
        print(f"{name:16} {median(values):6.2f} s for {options.gib} GiB")
    print(f"ratio            {small_pages / huge_pages:6.2f}")


if __name__ == "__main__":
    chz.nested_entrypoint(main)
