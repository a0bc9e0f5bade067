"""Numba's threads, launched where that leaves the caller's as they are."""

from __future__ import annotations

from threading import Thread

import numba


def launch_threads() -> None:
    """Launch Numba's threads from a thread of its own.

    Launching sets how many threads OpenMP uses from then on, for the thread that does it. PyTorch uses the same OpenMP:
    with another number of threads it sums in another order, and needs other scratch memory.
    """
    launcher = Thread(target=numba.get_num_threads, name="rotor_solver.launch_threads")
    launcher.start()
    launcher.join()
