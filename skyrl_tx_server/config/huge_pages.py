"""Enables transparent huge pages for the arrays of the server.

Linux assigns memory to a process in pages, at the first use of each page. 1 GiB needs 262,144 page faults
with pages of 4 KiB, and 512 with pages of 2 MiB. The GNU C library requests huge pages if `VARIABLE` contains
`REQUEST` when the process starts. `scripts/bench/huge_pages.py` measures the effect.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "GLIBC_TUNABLES"
REQUEST = "glibc.malloc.hugetlb=1"


def restart_with_huge_pages() -> None:
    """Restart this program with `REQUEST` in its environment. Does nothing if the user has set the variable,
    or if the system is not Linux."""
    if sys.platform != "linux" or VARIABLE in os.environ:
        return
    os.environ[VARIABLE] = REQUEST
    os.execv(sys.executable, sys.orig_argv)
