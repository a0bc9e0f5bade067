"""Parallel kernels run apart from their caller's thread.

How many threads OpenMP uses belongs to the thread that asks for them. Numba sets it when it loads a parallel kernel,
and every other library in that thread, such as torch, would go by it from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def apart(kernel: Callable[..., T], *arguments: object) -> T:
    """What `kernel(*arguments)` returns, called in a thread of its own."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(kernel, *arguments).result()
