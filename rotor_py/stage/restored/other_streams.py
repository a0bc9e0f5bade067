"""Random streams that PyTorch does not keep: Python's, NumPy's, and those of generators that a model has.

A stage may draw whether to skip a layer with `random.random()`. To look at these streams takes longer than to look at
PyTorch's own, so only those are looked at in every step from which the first forward of a stage has drawn.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn


class Stream(NamedTuple):
    """A random stream: its state, which can be compared, and what sets it back to one."""

    state: Callable[[], Hashable]
    set: Callable[[Any], object]


Drawn = tuple[tuple[Stream, Hashable], ...]
"""Streams that something has drawn from, with their states before."""

_drawing: WeakKeyDictionary[nn.Module, tuple[Stream, ...]] = WeakKeyDictionary()
"""Per stage, the streams that its first forward has drawn from."""


def streams_of(function: Callable[..., Any]) -> list[Stream]:
    """Those that a run of `function` may draw from, as far as they can be found."""
    found = [Stream(random.getstate, random.setstate)]
    if "numpy" in sys.modules:
        found.append(Stream(_numpy_state, _set_numpy_state))
    modules = function.modules() if isinstance(function, nn.Module) else ()
    values = [value for module in modules for value in vars(module).values()]
    generators = {id(value): value for value in values if isinstance(value, torch.Generator)}
    return [*found, *map(_of_generator, generators.values())]


@contextmanager
def other_draws(function: Callable[..., Any]) -> Iterator[list[Drawn]]:
    """Yields a list that holds what a forward of `function`, run in here, has drawn from once the context is left."""
    known = _drawing.get(function) if isinstance(function, nn.Module) else None
    before = [(stream, stream.state()) for stream in (streams_of(function) if known is None else known)]
    result: list[Drawn] = []
    yield result
    drawn = tuple((stream, state) for stream, state in before if known is not None or stream.state() != state)
    if known is None and isinstance(function, nn.Module):
        _drawing[function] = tuple(stream for stream, _ in drawn)
    result.append(drawn)


def draws(function: Callable[..., Any]) -> bool:
    """Whether a forward of a stage has drawn from these streams, so that the next one may do something else."""
    return isinstance(function, nn.Module) and bool(_drawing.get(function))


@contextmanager
def streams_kept(function: Callable[..., Any]) -> Iterator[None]:
    """Put these streams back, whatever is run in here."""
    before = [(stream, stream.state()) for stream in streams_of(function)]
    try:
        yield
    finally:
        for stream, state in before:
            stream.set(state)


def _numpy_state() -> Hashable:
    import numpy as np

    state: Any = np.random.get_state()  # of the stream that all of NumPy's functions share
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def _set_numpy_state(state: Any) -> None:
    import numpy as np

    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def _of_generator(generator: torch.Generator) -> Stream:
    def state() -> Hashable:
        return bytes(generator.get_state().numpy())

    def set_back(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Stream(state, set_back)
