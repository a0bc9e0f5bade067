"""Tensors without memory, laid out as kernels lay them out.

What a few operators would return PyTorch knows only by a rule for compilers, which lays it out as the gradient is.
Their kernels, on the CPU and on CUDA, make it contiguous, or channels last as their input is. Whoever gets the other
layout makes a copy that there is not. Found by comparing the strides of all that a step makes with and without memory,
with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten


def _contiguous(args: tuple[Any, ...]) -> torch.memory_format:
    return torch.contiguous_format


def _as_argument(position: int) -> Callable[[tuple[Any, ...]], torch.memory_format]:
    """The layout of an argument, of which only channels last is another one (`suggest_memory_format`)."""

    def layout(args: tuple[Any, ...]) -> torch.memory_format:
        given: torch.Tensor = args[position]
        for dimensions, found in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if given.dim() == dimensions and given.is_contiguous(memory_format=found) and not given.is_contiguous():
                return found
        return torch.contiguous_format

    return layout


_LAYOUTS: dict[Any, Callable[[tuple[Any, ...]], torch.memory_format]] = {
    _aten.native_layer_norm_backward.default: _contiguous,
    _aten._log_softmax_backward_data.default: _contiguous,
    _aten.native_batch_norm.default: _as_argument(0),
    _aten.native_batch_norm_backward.default: _as_argument(1),
    _aten.native_dropout_backward.default: _as_argument(0),  # of CUDA alone
}
"""The layout of the first result, by the operator's arguments."""

_MADE_AS_LARGE = (_aten.col2im.default, _aten.im2col.default)
"""Operators whose result is made as large as their input and then resized, so that a smaller one keeps the memory
(`col2im_cpu` in aten/src/ATen/native/Col2Im.cpp, `col2im_cuda`, and the same of `im2col`)."""

_OF_STORAGES = (_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset)
"""Operators with a storage among their arguments. PyTorch remembers what operators return by their arguments, and would
hold the storage for good."""


class TensorsWithoutMemory(FakeTensorMode):
    """While active, tensors that are made take no memory, and operators compute nothing."""

    def __init__(self) -> None:
        # Tensors with memory come in with losses: a target, for example.
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_STORAGES:
            remembers, self.cache_enabled = self.cache_enabled, False
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.cache_enabled = remembers
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _MADE_AS_LARGE and result.numel() < args[0].numel():
            with self:
                return torch.empty(args[0].numel(), dtype=result.dtype).as_strided(result.shape, result.stride())
        layout = _LAYOUTS.get(func)
        return result if layout is None else self._laid_out(result, layout(args))

    def _laid_out(self, result: Any, layout: torch.memory_format) -> Any:
        several = isinstance(result, tuple)
        first = result[0] if several else result
        if first is None or first.is_contiguous(memory_format=layout):
            return result
        with self:
            first = torch.empty_like(first, memory_format=layout)
        return (first, *result[1:]) if several else first
