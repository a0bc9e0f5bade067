"""With how many threads stages are timed beside other programs: as many as there are cores left.

Threads of an operator wait for each other, and spin meanwhile. Where other programs never let go of their cores, two
threads may share one for seconds: one run of a stage then takes several times as long as the next one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rotor_profiling.timing import several_processes

LOOKS = 5
BETWEEN_LOOKS = 0.01
"""In seconds: threads that wait for work have stopped spinning by then, and this one alone runs."""

_log = logging.getLogger("rotor_py")


def threads_left(device: torch.device) -> int | None:
    """How many threads have a core each, one at least; None if all do. If not all do, that is logged.

    Processes that train together have to run alike, and on another device than the CPU threads hardly matter: None.
    """
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if device.type != "cpu" or threads == 1 or several_processes():
        return None
    others = running_elsewhere()
    left = max(1, cores - others)
    if left >= threads:
        return None
    _log.warning(
        "other programs run on %d of %d cores: stages are timed with %d of %d threads, since threads that share a core "
        "wait for each other; with all threads, recomputing may take another part of the step than is promised",
        min(others, cores),
        cores,
        left,
        threads,
    )
    return left


@contextmanager
def so_many_threads(many: int | None) -> Iterator[None]:
    """Run what is inside with so many threads of torch; with all that there are for None."""
    before = torch.get_num_threads()
    if many is None or many == before:
        yield
        return
    torch.set_num_threads(many)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def running_elsewhere() -> int:
    """How many threads run, or wait for a core, beside this one: the least of several looks; zero if nobody counts.

    Linux does: the fourth field of /proc/loadavg (proc_loadavg(5)), in which this thread is one.
    """
    least = 0
    for look in range(LOOKS):
        try:
            found = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1
        except (OSError, ValueError, IndexError):
            return 0
        if found <= 0:
            return 0
        least = found if look == 0 else min(least, found)
        time.sleep(BETWEEN_LOOKS)
    return least
