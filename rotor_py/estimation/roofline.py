"""Predict the seconds of an operator by a roofline, and the scratch bytes that its CUDA kernel allocates.

    seconds = max(launch, operations / (rate × efficiency), bytes / (bandwidth × efficiency))

Williams, Waterman, Patterson, "Roofline", 2009: an operator takes as long as its floating point operations or its
memory traffic, whichever is slower. A kernel takes at least the time of its launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
ATTENTION_BACKWARD = {getattr(aten, f"{each.__name__}_backward") for each in ATTENTION}


def argument(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the value, given or default, of the argument `name` in a call of `func`; None if `func` has none."""
    for number, one in enumerate(func._schema.arguments):
        if one.name == name:
            return args[number] if number < len(args) else kwargs.get(name, one.default_value)
    return None


def query_key_value(
    func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Return query, key and value of a call of attention or its backward, each (batch, heads, length, width)."""
    return tuple(argument(func, args, kwargs, name) for name in ("query", "key", "value"))


_CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution, aten.convolution_backward}
# The CPU's operator for a whole LSTM layer, run in place of cuDNN's. Other recurrent layers run as matrix products.
_RECURRENT, _RECURRENT_BACKWARD = aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward
# Operators, besides views, that read and write no elements.
_FREE = {aten._unsafe_view, aten._reshape_alias, aten.lift_fresh, aten.empty, aten.empty_like, aten.empty_strided,
         aten.new_empty, aten.new_empty_strided, aten.set_, aten.resize_}  # fmt: skip
_WRITE_ONLY = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.bernoulli_, aten.random_,
               aten._foreach_copy_, aten._foreach_zero_}  # fmt: skip
# Operators that read as many elements of their first tensor as they return.
_ROWS = {aten.embedding, aten.index_select, aten.gather, aten.index}
# Losses that read one element of the input for each target, and their backwards, which write a whole gradient.
_ONE_OF_EACH_ROW = {aten.nll_loss_forward, aten.nll_loss2d_forward, aten.nll_loss_backward, aten.nll_loss2d_backward}
# Namespaces of operators of torch.distributed. They are assumed to overlap with computation, so they add no time.
_OTHERS = {"c10d", "_c10d_functional", "fsdp", "_dtensor"}


@dataclass(frozen=True, slots=True)
class Work:
    """Floating point operations of a call, and bytes that it reads and writes. `kind` is a field of `Efficiencies`."""

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


def work_of(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Work:
    packet = func.overloadpacket
    convolves = packet in _CONVOLUTIONS
    # By default, only convolutions may use TF32: https://docs.pytorch.org/docs/stable/notes/cuda.html
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
    """Count the floating point operations of matrix products, convolutions and attention; 0 for other operators."""
    packet = func.overloadpacket
    if packet in ATTENTION or packet in ATTENTION_BACKWARD:
        # Not by PyTorch's formula, which refuses fewer key heads than query heads and ignores causal masks.
        query, key, value = query_key_value(func, args, kwargs)
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        # The forward has two matrix products; the backward, which recomputes the scores, has five.
        forward = 2 * pairs * (query.shape[3] + value.shape[3])
        every = forward if packet in ATTENTION else pairs * (6 * query.shape[3] + 4 * value.shape[3])
        return every // 2 if argument(func, args, kwargs, "is_causal") else every
    if packet in (_RECURRENT, _RECURRENT_BACKWARD):
        value, of_input, of_state = args[:3]  # input (time, batch, width); weights of all gates for input and for state
        products = 2 * value.shape[0] * value.shape[1] * (of_input.numel() + of_state.numel())
        return int(products if packet is _RECURRENT else 2 * products)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def bytes_of(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the bytes that a call reads and writes. Repeated elements of an expanded tensor count once."""
    packet = func.overloadpacket
    if func.is_view or packet in _FREE or func.namespace in _OTHERS:
        return 0
    given = tensors_in((args, kwargs))
    written = [*tensors_in(out), *_written(func, args, kwargs)]
    if not written:  # an operator without tensor results, such as prim::device
        return 0
    if packet in _ROWS:
        return 2 * touched(written) + touched(given[1:])
    if packet in _ONE_OF_EACH_ROW:
        return 2 * touched([argument(func, args, kwargs, "target")]) + touched(written)
    if packet in _WRITE_ONLY:
        given = given[len(_written(func, args, kwargs)) :]
    return touched(given) + touched(written)


def touched(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of `tensors`: equal views of a storage once, an expanded dimension (stride 0) as one element."""
    seen: set[tuple[Any, ...]] = set()
    total = 0
    for tensor in tensors:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride()) if tensor.layout == torch.strided else ()
        # Identify storages by their handle: fake tensors have no address.
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), shape, stride) if stride else (id(tensor),)
        if key not in seen:
            seen.add(key)
            sizes = (size for size, step in zip(shape, stride, strict=True) if step) if stride else shape
            total += math.prod(sizes) * tensor.element_size()
    return total


def _written(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    written = (one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    return tensors_in([argument(func, args, kwargs, name) for name in written])


def _dtype(args: Sequence[Any]) -> torch.dtype:
    """Return the narrowest dtype of `args`, assumed for factors: statistics and the addend of `addmm` may be wider."""
    found = [each.dtype for each in tensors_in(args) if each.dtype.is_floating_point or each.dtype.is_complex]
    return min(found, key=lambda each: each.itemsize, default=torch.float32)


# Scratch bytes that CUDA's kernels request from PyTorch's allocator inside an operator, where no dispatch mode sees
# them. Each function adds up the requests of the PyTorch code it names. cuDNN's workspace for convolutions is assumed.

_RMS_NORM_BACKWARD = getattr(aten, "_fused_rms_norm_backward", None)  # Since torch 2.8.
_THREADS = 132 * 2048  # number of threads that an H100 runs at once
_FLOAT, _LONG = 4, 8  # bytes
_Call = tuple[torch_compat.OpOverload, Sequence[Any], Mapping[str, Any], Any]


def scratch_bytes(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the bytes that `func` takes on CUDA, besides arguments and result, while it runs; 0 if unknown."""
    found = _SCRATCH.get(func.overloadpacket)
    return 0 if found is None else found((func, args, kwargs, out))


def _flash_backward(call: _Call) -> int:
    """Scratch bytes of `mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.

    It sums the gradient of queries in 32 bits. With fewer key heads than query heads, it first computes gradients of
    keys and values for every query head. Its caller, `_flash_attention_backward` in attention_backward.cu, copies the
    output and its gradient unless all heads of a token are contiguous.
    """
    given = (argument(*call[:3], name) for name in ("grad_out", "out"))
    copies: int = sum(each.nbytes for each in given if not each.transpose(1, 2).is_contiguous())
    return copies + _flash_sums(call)


def _flash_sums(call: _Call) -> int:
    query, key, value = query_key_value(*call[:3])
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    size = _FLOAT * rows * (_up(width, 32) if width <= 192 else 256) + _FLOAT * rows
    if key.shape[1] != heads:
        size += batch * heads * (key.shape[2] * key.shape[3] + value.shape[2] * value.shape[3]) * key.element_size()
    return size


def _efficient_backward(call: _Call) -> int:
    """Scratch bytes of `_efficient_attention_backward` in attention_backward.cu: `delta`, and a workspace.

    The workspace (kernel_backward.h) has sums in 32 bits, in blocks of 128 rows and 64 columns: for the gradient of
    queries always (`kNeedsAccumGradQ`), for those of keys and values only with 16-bit heads wider than 128.
    """
    query, key, value = query_key_value(*call[:3])
    batch, heads, length, width = query.shape
    size = _FLOAT * batch * heads * (length + _up(length, 128) * _up(width, 64))
    if query.element_size() < _FLOAT and max(width, value.shape[3]) > 128:
        rows = batch * heads * _up(key.shape[2], 128)
        size += _FLOAT * rows * (_up(width, 64) + _up(value.shape[3], 64))
    return size


def _embedding_backward(call: _Call) -> int:
    """Scratch bytes of `embedding_dense_backward_cuda` in Embedding.cu, with EmbeddingBackwardKernel.cu.

    It sorts the indices, then sums the gradient rows of each in 32 bits, first in tens of rows (NROWS_PER_THREAD).
    """
    func, args, kwargs, _ = call
    gradient, indices = args[0], argument(func, args, kwargs, "indices")
    rows, count, each = argument(func, args, kwargs, "num_weights"), int(indices.numel()), int(indices.element_size())
    if count <= 3072 and not argument(func, args, kwargs, "scale_grad_by_freq"):
        return 0  # a single kernel without sorting
    segments = min(count, int(rows))
    partial = count // 10 + segments
    width: int = max(_FLOAT, gradient.element_size())
    # Sorted indices and their positions stay in memory. Sorting also needs the unsorted positions and cub's copies of
    # both; summing needs the offsets of the rows of each index and of their parts of ten, and the partial sums.
    summing = (3 * segments + partial) * each + partial * int(gradient.shape[-1]) * width
    return 2 * count * each + max(3 * count * each, summing)


def _index_put(call: _Call) -> int:
    """Scratch bytes of `index_put_with_sort_kernel` in Indexing.cu: indices, positions, both sorted, cub's copies."""
    func, args, kwargs, _ = call
    if not argument(func, args, kwargs, "accumulate"):
        return 0
    return 6 * _LONG * max((each.numel() for each in tensors_in(argument(func, args, kwargs, "indices"))), default=0)


def _sort(call: _Call) -> int:
    """Scratch bytes of `sort_cuda_kernel` in Sort.cpp, assumed to be one more copy of keys and indices, in cub."""
    given = tensors_in(call[1])[0]
    return given.numel() * (given.element_size() + _LONG)


def _im2col(call: _Call) -> int:
    """Scratch bytes of `im2col_cuda` in Im2Col.cu: a result of the image's size, replaced if the result is larger."""
    given, out = tensors_in(call[1])[0], call[3]
    return int(given.nbytes) if out.numel() > given.numel() else 0


def _sum(call: _Call) -> int:
    """Scratch bytes of a sum over the first dimensions, such as the gradient of a bias; 0 for other sums."""
    given, sizes = tensors_in(call[1])[0], argument(*call[:3], "dim")
    dims = sorted(each % given.dim() for each in sizes or ())
    leading = dims and len(dims) < given.dim() and dims == list(range(len(dims)))
    if not leading or not given.is_contiguous():
        return 0
    rows = math.prod(given.shape[: len(dims)])
    return _column_sums(rows, given.numel() // max(rows, 1))


def _column_sums(rows: int, width: int) -> int:
    """Scratch bytes of a sum of `rows` rows with `width` columns: thread blocks add their sums in global memory.

    As in `setReduceConfig` and `global_memory_size` of Reduce.cuh, a block covers 128 columns, 4 by each of 32 threads,
    and reads 4 rows at a time; a thread adds 16 to 256 elements of a column. Measured bytes on an H100 agree for 512 to
    4096 rows of 256 to 1024 columns.
    """
    if rows < 1024:
        return 0
    columns = -(-width // 128)
    most = -(-_THREADS // (128 * columns))
    blocks = max(min(most, -(-rows // 64)), -(-rows // 1024))
    return _FLOAT * width * 128 * blocks if columns <= _THREADS // 128 and blocks > 1 else 0


def _norm_backward(call: _Call) -> int:
    """Scratch bytes of `LaunchGammaBetaBackwardCUDAKernel` (layer_norm_kernel.cu): sums many narrow rows in two steps.

    A row is narrow if it takes fewer warps than half of the multiprocessors, of which large devices have 132 to 148.
    """
    given = tensors_in(call[1])
    width: int = math.prod(argument(*call[:3], "normalized_shape"))
    rows = given[0].numel() // max(width, 1)
    warps = -(-width // 32)
    if rows <= 64 * 1024 or warps >= 66:
        return 0
    parts = min(32 * 1024 // warps, -(-rows // 32))
    tables = 1 if call[0].overloadpacket is _RMS_NORM_BACKWARD else 2
    return tables * parts * width * given[-1].element_size() + _column_sums(parts, width)


def _convolution(call: _Call) -> int:
    """Scratch bytes of cuDNN. Assumed: it copies tensors to channels last, which tensor cores read
    (https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional, section on layouts).
    """
    given = [each for each in tensors_in((call[1], call[3])) if each.dim() >= 4]
    if all(each.dim() == 4 for each in given):
        given = [each for each in given if not each.is_contiguous(memory_format=torch.channels_last)]
    return sum(each.nbytes for each in given)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


_SCRATCH: dict[Any, Callable[[_Call], int]] = {
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _flash_sums,  # assumed: as for flash attention
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten.embedding_dense_backward: _embedding_backward,
    aten.index_put: _index_put,
    aten.index_put_: _index_put,
    aten._index_put_impl_: _index_put,
    aten._unsafe_index_put: _index_put,
    aten.im2col: _im2col,
    aten.sort: _sort,
    aten.sum: _sum,
    aten.native_layer_norm_backward: _norm_backward,
    _RMS_NORM_BACKWARD: _norm_backward,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution,
}
