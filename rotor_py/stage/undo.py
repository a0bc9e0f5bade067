"""The first forward of a stage, undone: buffers, attributes and the random state are again what they were before it.

Only where a stage may have to be run a second time because it ran out of memory: copies of its buffers cost memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rotor_profiling import bytes_like
from rotor_profiling.attributes import Attributes
from rotor_profiling.isolate import RandomState, buffer_slots
from rotor_py.stage.surroundings import slots_that_move


class Undo:
    """What the forward of `function`, which is about to begin, may change. `devices` are those of its random state."""

    def __init__(self, function: Callable[..., Any], devices: tuple[torch.device, ...]) -> None:
        self._random = RandomState.now(devices)
        self._attributes = Attributes(function)
        self._copies = [(slot, slot[2].clone()) for slot in slots_that_move(function)]
        copied = {id(tensor) for (_, _, tensor), _ in self._copies}
        # Not thought to change, so there is no copy. Should one change after all, that is noticed.
        self._others = [(slot, slot[2]._version) for slot in buffer_slots(function) if id(slot[2]) not in copied]

    def restore(self) -> str | None:
        """Put everything back. Returns what could not be: why the stage cannot be run as if for the first time."""
        self._random.restore()
        try:
            self._attributes.put_back()
        except RuntimeError as error:
            return str(error)
        for (table, name, tensor), before in self._copies:
            table[name] = tensor
            # What has not changed is not written: a buffer may be one number seen many times (`expand`).
            if not torch.equal(tensor, before):
                # By way of `data`, which leaves the version: the graph of an earlier forward may have saved the buffer.
                tensor.data.copy_(before)
        for (table, name, tensor), version in self._others:
            if table[name] is not tensor or tensor._version != version:
                return f"buffer {name!r} was changed for the first time, and there is no copy of it"
        return None


def undo_bytes(functions: Iterable[nn.Module]) -> int:
    """The most bytes that an `Undo` holds for one of these stages. Each is let go of before the next is made."""
    return max((bytes_like(slot[2] for slot in slots_that_move(function)) for function in functions), default=0)
