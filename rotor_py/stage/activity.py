"""What a step does when: every run and every backward of a stage, told to whoever watches while it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rotor_profiling.storage import tensors_in

BACKWARD = "backward"

Watcher = Callable[[str, str, bool], None]
"""Called with what is done ("forward", "recomputation" or "backward"), the stage's name, and whether it begins or ends.

The backward of a stage that the engine goes through by itself begins when its gradient arrives; nobody hears its end.
"""

_watchers: list[Watcher] = []


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of everything that stages do in this process."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell(doing: str, name: str, begins: bool) -> None:
    """Something begins or ends."""
    for watcher in _watchers:
        watcher(doing, name, begins)


def tell_of_backward(output: Any, name: str) -> None:
    """Tell of the backward of a stage that was run in the caller's graph, once it begins."""
    if _watchers and torch.is_grad_enabled():
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: tell(BACKWARD, name, True))
