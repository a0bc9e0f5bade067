"""Calls of modules, seen from outside: which models a program runs, and with what."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

from torch import nn


class Handler(Protocol):
    """Is called instead of a module; `run()` is the call that was to be made."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """The output of the call."""


@contextmanager
def outermost_calls(handler: Handler) -> Iterator[Callable[[], None]]:
    """Inside, `handler` stands between the program and every call of a module that no other module makes.

    These are calls in the thread and the process that entered the context, and not those of a backward, where modules
    are called to be run again. Gives a function that ends it before the context does.
    """
    # Not a global forward hook of torch: it is not told keyword arguments, which models of transformers are called by.
    # TorchDynamo compares `Module.__call__` with the one that it found when it was imported.
    import torch._dynamo

    kind: Any = nn.Module
    called, here = kind.__call__, (os.getpid(), threading.get_ident())
    inside, watching = False, True

    @wraps(called)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        elsewhere = here != (os.getpid(), threading.get_ident())
        if inside or elsewhere or torch._C._current_graph_task_id() != -1:
            return called(self, *args, **kwargs)
        inside, kind.__call__ = True, called  # as it is: TorchDynamo looks at it while it captures
        try:
            return handler(self, args, kwargs, lambda: called(self, *args, **kwargs))
        finally:
            inside, kind.__call__ = False, call if watching else called

    def stop() -> None:
        nonlocal watching
        watching, kind.__call__ = False, called

    kind.__call__ = call
    try:
        yield stop
    finally:
        stop()
