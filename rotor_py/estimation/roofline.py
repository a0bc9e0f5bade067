"""Predict the seconds of an operator from its operations and its bytes read and written.

    seconds = launch, or max(operations / (rate × efficiency), bytes / (bandwidth × efficiency)), whichever is longer

Williams, Waterman, Patterson, "Roofline", 2009: the scarcer resource bounds the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from rotor_profiling import torch_compat
from rotor_profiling.storage import tensors_in
from rotor_py.data_sheet import Device

aten = torch.ops.aten

ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_fused_attention_overrideable,
}
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward,
}
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward


def argument(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument `name`, as given or by default. None if the operator has no such argument."""
    for number, one in enumerate(func._schema.arguments):
        if one.name == name:
            return args[number] if number < len(args) else kwargs.get(name, one.default_value)
    return None


def query_key_value(
    func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of an attention, forward or backward: (batch, heads, length, width) each."""
    query, key, value = (argument(func, args, kwargs, name) for name in ("query", "key", "value"))
    return query, key, value


_CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution, aten.convolution_backward}
_RECURRENT, _RECURRENT_BACKWARD = aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward
"""A whole LSTM layer on a CPU, in place of cuDNN's. Other recurrent layers come as matrix products."""
_FREE = {aten._unsafe_view, aten._reshape_alias, aten.lift_fresh, aten.empty, aten.empty_like, aten.empty_strided,
         aten.new_empty, aten.new_empty_strided, aten.set_, aten.resize_}  # fmt: skip
"""Operators other than views that touch no element."""
_WRITE_ONLY = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.bernoulli_, aten.random_,
               aten._foreach_copy_, aten._foreach_zero_}  # fmt: skip
"""Operators that do not read the tensor they overwrite."""
_ROWS = {aten.embedding, aten.index_select, aten.gather, aten.index}
"""Operators that read as many elements of their first tensor as they return."""
_ONE_OF_EACH_ROW = {aten.nll_loss_forward, aten.nll_loss2d_forward, aten.nll_loss_backward, aten.nll_loss2d_backward}
"""Operators that read one number per target. The backwards write all of their result."""
_OTHERS = {"c10d", "_c10d_functional", "fsdp", "_dtensor"}
"""Collectives are assumed to overlap with computation, so they take no time."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one operator on any device: floating point operations, and bytes read and written.

    `kind` selects the efficiency of the operations; `dtype` is the multiplied dtype, as TF32 if `tf32`.
    """

    operations: int
    bytes: int
    kind: Literal["matmul", "convolution", "attention", "attention_backward"]
    dtype: torch.dtype
    tf32: bool = False

    def seconds(self, device: Device) -> float:
        if not self.operations and not self.bytes:
            return 0.0
        streaming = self.bytes / (device.bandwidth * device.efficiencies.streaming)
        if not self.operations:
            return max(streaming, device.launch_seconds)
        efficiency: float = getattr(device.efficiencies, self.kind)
        computing = self.operations / (device.rates.of(self.dtype, tf32=self.tf32) * efficiency)
        return max(computing, streaming, device.launch_seconds)


class Roofline:
    """Predict the seconds of an operator call on a simulated device.

    Reads shapes, strides and dtypes only, so fake tensors of any device work. `tf32` allows TF32 for products of 32
    bits; by default, the process's setting for CUDA.
    """

    def __init__(self, device: Device, *, tf32: bool | None = None) -> None:
        self.device = device
        self._tf32 = tf32

    def __call__(
        self, func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> float:
        return work_of(func, args, kwargs, out, tf32=self._tf32).seconds(self.device)


def work_of(
    func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, tf32: bool | None = None
) -> Work:
    packet = func.overloadpacket
    convolves = packet in _CONVOLUTIONS
    if tf32 is None:
        # The defaults allow TF32 for convolutions, not for matrices:
        # https://docs.pytorch.org/docs/stable/notes/cuda.html
        tf32 = torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"
    return Work(
        operations_of(func, args, kwargs, out),
        bytes_of(func, args, kwargs, out),
        "attention" if packet in ATTENTION
        else "attention_backward" if packet in ATTENTION_BACKWARD
        else "convolution" if convolves
        else "matmul",
        _dtype(args),
        tf32,
    )  # fmt: skip


def operations_of(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating point operations of matrix products, convolutions and attention; 0 for other operators."""
    packet = func.overloadpacket
    if packet in ATTENTION or packet in ATTENTION_BACKWARD:
        # PyTorch's registered formula asserts as many key heads as query heads and ignores causal masks.
        query, key, value = query_key_value(func, args, kwargs)
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        # Two products forward; five backward, which recomputes the scores.
        forward = 2 * pairs * (query.shape[3] + value.shape[3])
        every = forward if packet in ATTENTION else pairs * (6 * query.shape[3] + 4 * value.shape[3])
        return every // 2 if argument(func, args, kwargs, "is_causal") else every
    if packet in (_RECURRENT, _RECURRENT_BACKWARD):
        value, of_input, of_state = args[:3]  # (time, batch, width); the gates' weights in one matrix each
        products = 2 * value.shape[0] * value.shape[1] * (of_input.numel() + of_state.numel())
        return int(products if packet is _RECURRENT else 2 * products)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def bytes_of(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes read and written: each tensor once, without the repeats of an expanded one."""
    packet = func.overloadpacket
    if func.is_view or packet in _FREE or func.namespace in _OTHERS:
        return 0
    given = tensors_in((args, kwargs))
    written = [*tensors_in(out), *_written(func, args, kwargs)]
    if not written:  # a query, such as prim::device
        return 0
    if packet in _ROWS:
        return 2 * touched(written) + touched(given[1:])
    if packet in _ONE_OF_EACH_ROW:
        target = argument(func, args, kwargs, "target")
        return 2 * touched([target]) + touched(written)
    if packet in _WRITE_ONLY:
        given = given[len(_written(func, args, kwargs)) :]
    return touched(given) + touched(written)


def touched(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind `tensors`, each view once; a dimension of stride 0 counts one element."""
    seen: set[tuple[Any, ...]] = set()
    total = 0
    for tensor in tensors:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride()) if tensor.layout == torch.strided else ()
        # Use the handle: fake tensors have no address.
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), shape, stride) if stride else (id(tensor),)
        if key not in seen:
            seen.add(key)
            sizes = (size for size, step in zip(shape, stride, strict=True) if step) if stride else shape
            total += math.prod(sizes) * tensor.element_size()
    return total


def _written(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found = []
    for number, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(one.name))
    return tensors_in(found)


def _dtype(args: Sequence[Any]) -> torch.dtype:
    """The narrowest dtype, which is multiplied. Statistics and the addend of `addmm` may be wider."""
    found = [each.dtype for each in tensors_in(args) if each.dtype.is_floating_point or each.dtype.is_complex]
    return min(found, key=lambda each: each.itemsize, default=torch.float32)
