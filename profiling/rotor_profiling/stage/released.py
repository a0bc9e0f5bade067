"""What a run with a graph does not hold of its input and output.

Of most inputs, it can be seen when nobody holds them any more (`WatchedInput`). Others cannot be watched, tensors of
subclasses and those without memory: of these, a copy is let go of.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only
from torch.utils.dlpack import from_dlpack

from rotor_profiling.memory import MemoryMeter, Phase
from rotor_profiling.stage.gradients import leaves_of, scalar_after
from rotor_profiling.stage.runner import Runner
from rotor_profiling.storage import allocated, storages, tensors_in

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SHARED = frozenset((*_FLOATS, *_INTEGERS))
"""What every release of torch hands to itself by DLPack."""


class WatchedInput:
    """`value` with twins of its tensors: others over the same memory, whose storages are their own.

    A tensor itself has other holders while its stage is measured, so what a graph holds of it does not show. A copy
    would take as much memory again. Tensors whose storages are `owned` are no part of the input, and have no twins.
    """

    def __init__(self, value: Any, owned: frozenset[int]) -> None:
        self.nbytes = 0
        """of all twins, as if each was allocated"""
        self._watched: list[tuple[StorageWeakRef, int]] = []
        self.value: Any = tree_map_only(torch.Tensor, lambda each: self._twin(each, owned), value)

    def let_go(self) -> int:
        """Let go of the twins; return the bytes of those that nothing else holds."""
        self.value = None
        return self.freed()

    def freed(self) -> int:
        """The bytes of the twins that have been let go of since somebody asked."""
        gone = [(storage, size) for storage, size in self._watched if storage.expired()]
        self._watched = [each for each in self._watched if each not in gone]
        return sum(size for _, size in gone)

    def _twin(self, tensor: torch.Tensor, owned: frozenset[int]) -> torch.Tensor:
        if owned.issuperset(storages([tensor])):
            return tensor
        twin = from_dlpack(tensor.detach())
        if twin.stride() != tensor.stride():  # some releases write 1 for the stride of a side of length one
            twin = twin.as_strided(tensor.shape, tensor.stride())
        size = allocated(tensor.numel() * tensor.element_size(), tensor.device.type)
        self.nbytes += size
        self._watched.append((StorageWeakRef(twin.untyped_storage()), size))
        return twin.requires_grad_(tensor.requires_grad)


def can_be_watched(value: Any) -> bool:
    """Whether all tensors of `value` are plain memory, of which there can be twins."""
    return all(_is_plain(tensor) for tensor in tensors_in(value))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.dtype in _SHARED
        and not (tensor.is_conj() or tensor.is_neg())
    )


def run_to_release(runner: Runner, value: Any, owned: frozenset[int], meter: MemoryMeter) -> None:
    """Phases "copy" of the input, "run", and "input" and "output", in which these are let go of.

    Tensors whose storages are `owned` are not copied.
    """
    leaf = leaves_of(value)
    meter.mark("copy")
    # A copy, as if another layer had made it: the input itself has other holders, so nothing would ever be freed.
    copy = tree_map_only(torch.Tensor, partial(_copied, owned), leaf)
    meter.mark("run")
    output = runner.forward(copy)
    source = scalar_after(output)
    meter.mark("input")
    del copy
    meter.mark("output")
    del output
    meter.mark("between")
    del source


def released_bytes(phases: Mapping[str, Phase], input_bytes: int) -> tuple[int, int]:
    """Bytes of the input, and of the output, that a run with a graph does not hold on to."""
    # If the copy is not as large as the input in the chain, they are not comparable, and nothing is promised.
    whole = phases["copy"].kept == input_bytes
    return max(0, -phases["input"].kept) if whole else 0, max(0, -phases["output"].kept)


def _copied(owned: frozenset[int], tensor: torch.Tensor) -> torch.Tensor:
    return tensor if owned.issuperset(storages([tensor])) else tensor.clone()
