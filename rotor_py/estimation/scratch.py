"""Scratch bytes that CUDA's kernels allocate through PyTorch's allocator, which no graph shows.

Each formula cites PyTorch's code. cuDNN's workspace for convolutions depends on its heuristics and is assumed; the
others are the sizes in the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rotor_profiling import torch_compat
from rotor_profiling.storage import tensors_in
from rotor_py.estimation.roofline import (
    CUDNN_BACKWARD,
    EFFICIENT_BACKWARD,
    FLASH_BACKWARD,
    argument,
    query_key_value,
)

aten = torch.ops.aten

_RMS_NORM_BACKWARD = getattr(aten, "_fused_rms_norm_backward", None)
"""Since torch 2.8."""
_THREADS = 132 * 2048
"""Resident threads of an H100."""
_FLOAT = 4
_LONG = 8
_Call = tuple[torch_compat.OpOverload, Sequence[Any], Mapping[str, Any], Any]


def scratch_bytes(func: torch_compat.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Scratch bytes of `func` on CUDA, beyond arguments and result. 0 if none are known."""
    found = _SCRATCH.get(func.overloadpacket)
    return 0 if found is None else found((func, args, kwargs, out))


def _flash_backward(call: _Call) -> int:
    """`mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.

    Accumulates the queries' gradient in 32 bits; with fewer key heads, expands their gradients to every head first.
    Copies the output and its gradient unless a token's heads are contiguous (`_flash_attention_backward` in
    attention_backward.cu); the output is if the queries are.
    """
    given = (argument(*call[:3], name) for name in ("grad_out", "out"))
    copies: int = sum(each.numel() * each.element_size() for each in given if not each.transpose(1, 2).is_contiguous())
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
    """`_efficient_attention_backward` in attention_backward.cu: `delta`, and the workspace of kernel_backward.h.

    Accumulates the queries' gradient in 32 bits over splits of the keys, whatever their dtype (`kNeedsAccumGradQ`), in
    blocks of 128 rows and 64 columns; those of keys and values only if heads exceed the registers.
    """
    query, key, value = query_key_value(*call[:3])
    batch, heads, length, width = query.shape
    size = _FLOAT * batch * heads * (length + _up(length, 128) * _up(width, 64))
    if query.element_size() < _FLOAT and max(width, value.shape[3]) > 128:
        rows = batch * heads * _up(key.shape[2], 128)
        size += _FLOAT * rows * (_up(width, 64) + _up(value.shape[3], 64))
    return size


def _embedding_backward(call: _Call) -> int:
    """`embedding_dense_backward_cuda` in Embedding.cu, `embedding_backward_cuda_kernel` in EmbeddingBackwardKernel.cu.

    Sorts indices, then sums rows in 32 bits: ten of one index at a time (NROWS_PER_THREAD), then the partial sums.
    """
    func, args, kwargs, _ = call
    gradient, indices = args[0], argument(func, args, kwargs, "indices")
    rows, count, each = argument(func, args, kwargs, "num_weights"), int(indices.numel()), int(indices.element_size())
    if count <= 3072 and not argument(func, args, kwargs, "scale_grad_by_freq"):
        return 0  # a single kernel without sorting
    segments = min(count, int(rows))
    partial = count // 10 + segments
    width: int = max(_FLOAT, gradient.element_size())
    # Sorted indices and their positions stay. Sorting adds a range and cub's copy of both; summing adds the offsets of
    # segments and of their parts, and the sums.
    summing = (3 * segments + partial) * each + partial * int(gradient.shape[-1]) * width
    return 2 * count * each + max(3 * count * each, summing)


def _index_put(call: _Call) -> int:
    """`index_put_with_sort_kernel` in Indexing.cu: with `accumulate`, sorts linear indices.

    Holds the indices, a range, both sorted, and cub's copy of both.
    """
    func, args, kwargs, _ = call
    if not argument(func, args, kwargs, "accumulate"):
        return 0
    indices = tensors_in(argument(func, args, kwargs, "indices"))
    return 6 * _LONG * max((each.numel() for each in indices), default=0)


def _sort(call: _Call) -> int:
    """`sort_cuda_kernel` in Sort.cpp. Assumed: cub copies keys and indices once more."""
    given = tensors_in(call[1])[0]
    return given.numel() * (given.element_size() + _LONG)


def _im2col(call: _Call) -> int:
    """`im2col_cuda` in Im2Col.cu allocates a result as large as the image, and another one if more is needed."""
    given, out = tensors_in(call[1])[0], call[3]
    return int(given.numel() * given.element_size()) if out.numel() > given.numel() else 0


def _sum(call: _Call) -> int:
    """Sums over leading dimensions, as for the gradient of a bias."""
    given, sizes = tensors_in(call[1])[0], argument(*call[:3], "dim")
    dims = sorted(each % given.dim() for each in sizes or ())
    leading = dims and len(dims) < given.dim() and dims == list(range(len(dims)))
    if not leading or not given.is_contiguous():
        return 0
    rows = math.prod(given.shape[: len(dims)])
    return _column_sums(rows, given.numel() // max(rows, 1))


def _column_sums(rows: int, width: int) -> int:
    """`setReduceConfig` and `global_memory_size` in Reduce.cuh: blocks share the rows and accumulate in memory.

    A block has 32 threads of 4 columns each and 4 rows at a time; each thread adds 16 to 256 numbers. On an H100, sums
    of 1024 to 4096 rows of 256 to 1024 columns took these bytes, and sums of 512 rows none.
    """
    if rows < 1024:
        return 0
    columns = -(-width // 128)
    most = -(-_THREADS // (128 * columns))
    blocks = max(min(most, -(-rows // 64)), -(-rows // 1024))
    return _FLOAT * width * 128 * blocks if columns <= _THREADS // 128 and blocks > 1 else 0


def _norm_backward(call: _Call) -> int:
    """`LaunchGammaBetaBackwardCUDAKernel` in layer_norm_kernel.cu: sums long batches of narrow rows in two steps.

    Narrow: fewer warps than half of the multiprocessors; the largest devices have 132 to 148.
    """
    given = tensors_in(call[1])
    width: int = math.prod(argument(*call[:3], "normalized_shape"))
    rows = given[0].numel() // max(width, 1)
    warps = -(-width // 32)
    if rows <= 64 * 1024 or warps >= 66:
        return 0
    parts = min(32 * 1024 // warps, -(-rows // 32))
    weights = given[-1].element_size()
    tables = 1 if call[0].overloadpacket is _RMS_NORM_BACKWARD else 2
    return tables * parts * width * weights + _column_sums(parts, width)


def _convolution(call: _Call) -> int:
    """Assumed: cuDNN's layout conversion.

    Its tensor cores read channels last, so it copies other tensors into its workspace
    (https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional, section on layouts).
    """
    given = [each for each in tensors_in((call[1], call[3])) if each.dim() >= 4]
    other = [each for each in given if not each.is_contiguous(memory_format=torch.channels_last)] if all(
        each.dim() == 4 for each in given) else given  # fmt: skip
    return sum(each.numel() * each.element_size() for each in other)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


_SCRATCH: dict[Any, Callable[[_Call], int]] = {
    FLASH_BACKWARD: _flash_backward,
    CUDNN_BACKWARD: _flash_sums,  # assumed; `MHA.cpp` asks cuDNN's graph for its workspace
    EFFICIENT_BACKWARD: _efficient_backward,
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
