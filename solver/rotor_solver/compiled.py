"""Numba's threads, started so that nobody else's number of threads changes."""

from __future__ import annotations

from functools import cache
from threading import Thread

import numba


@cache
def start_threads() -> None:
    """Start Numba's threads, once, from a thread that ends right after.

    Starting them sets how many threads OpenMP uses for whatever the starting thread calls next. PyTorch's operators are
    among that: from the first plan on, they would cut their sums into other parts, and the last digits of a model in
    training would change.
    """
    starter = Thread(target=numba.get_num_threads)
    starter.start()
    starter.join()
