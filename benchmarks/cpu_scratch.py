"""Bytes that the CPU's convolutions, norms, embeddings and attention allocate for themselves while they run.

Of convolutions, it is what oneDNN turns around. PyTorch has oneDNN run them, which reads and writes channels in blocks
of a vector's length, and copies what is laid out otherwise. Found by experiment: a memory meter around single calls,
forward and backward, of 1 to 32 images of 4 to 64 pixels, 1 to 768 channels, kernels of 1 to 11, with strides and
dilation, in both layouts, with torch 2.13 on AVX-512. These rules give what was seen to within 3 % for most, or within
some 40 kB that do not grow with the tensors, and assume that vectors of other lengths differ in nothing else. With
several threads, oneDNN at times sums gradients of weights in each, one weight for a thread, which no rule here has.
32 bits alone were looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rotor_py.estimation.roofline import argument, query_key_value

aten = torch.ops.aten

_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
"""By the number of dimensions."""


def cpu_scratch_bytes(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """The bytes that `func` holds on the CPU beyond what it is given and what it returns. 0 where none are known of."""
    packet = func.overloadpacket
    if packet not in (aten.convolution, aten.convolution_backward):
        copied = sum(_copied(argument(func, args, kwargs, name)) for name in _COPIED.get(packet, ()))
        if packet is aten.im2col and out.numel() > args[0].numel():
            # It makes a result as large as the image, and then a larger one: `im2col_cpu` in Im2Col.cpp.
            return copied + _bytes(args[0])
        return copied + (_OTHERS[packet](func, args, kwargs) if packet in _OTHERS else 0)
    value, weight = argument(func, args, kwargs, "input"), argument(func, args, kwargs, "weight")
    if value.dtype != torch.float32:
        return 0
    forward = packet is aten.convolution
    result = out if forward else argument(func, args, kwargs, "grad_output")
    groups = argument(func, args, kwargs, "groups")
    if argument(func, args, kwargs, "transposed"):
        found = _Transposed(value, weight, result)
        return found.forward() if forward else found.backward()
    steps = (*argument(func, args, kwargs, "stride"), *argument(func, args, kwargs, "dilation"))
    convolution = _Convolution(value, weight, result, groups, steps, argument(func, args, kwargs, "padding")[0])
    return convolution.forward() if forward else convolution.backward(argument(func, args, kwargs, "output_mask")[0])


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution of `value`, which gives `result`, or gets its gradient."""

    value: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    groups: int
    steps: tuple[int, ...]
    """Strides, then dilation."""
    padding: int
    """Rows above the image, and below it."""

    @property
    def channels_last(self) -> bool:
        """Whether oneDNN runs it on channels last: as the input or the weight is."""
        return any(_is_channels_last(each) and not each.is_contiguous() for each in (self.value, self.weight))

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.value.shape[1] == self.result.shape[1]

    @property
    def strided(self) -> bool:
        return max(self.steps[: len(self.steps) // 2]) > 1

    @property
    def by_pytorch(self) -> bool:
        """Whether PyTorch runs it by itself (`use_mkldnn` in aten/src/ATen/native/Convolution.cpp)."""
        images, kernel = self.value.shape[0], self.weight.shape[2:]
        product = max(*kernel, *self.steps) == 1 and images < 16 and torch.get_num_threads() == 1
        alone = images == 1 and min(kernel) <= 3 and self.value.numel() <= 20480
        return self.groups == 1 and (product or alone)

    @property
    def small(self) -> bool:
        """Whether there is a kernel of its own for it, if it is depthwise: for 3 × 3.

        It wants a row between those that read padding above the image, and those that read it below.
        """
        if max(self.weight.shape[2:]) > 3 or max(self.steps[len(self.steps) // 2 :]) > 1:
            return False
        stride, above = self.steps[0], self.padding
        inside = (self.value.shape[2] + above - self.weight.shape[2]) // stride + 1 - -(-above // stride)
        return above == 0 or bool(inside > 0)

    def forward(self) -> int:
        """While it runs, there are copies in blocks of all three; then the result is laid out as it is wanted."""
        if self.by_pytorch:
            return self._columns()
        weight = self._weight(self._filled())
        if self.channels_last:
            return weight if self.depthwise else _bytes(self.weight) + weight
        copies = weight + (0 if self._few() else _blocked(self.value))
        result = _blocked(self.result)
        return _copied(self.value) + max(copies + self._picked() + result - _bytes(self.result), result)

    def backward(self, of_input: bool) -> int:
        """The gradient of the input comes first, then that of the weight."""
        if self.by_pytorch:
            return _copied(self.value) + _copied(self.result) + self._columns()
        weight, into = _bytes(self.weight), self._into()
        if self.channels_last:
            # The result's gradient is copied if it lies otherwise.
            copied = 0 if _is_channels_last(self.result) else _bytes(self.result)
            if not self.depthwise:
                return copied + 2 * weight + (self._weight(self._filled()) if self.groups == 1 else self._each_group())
            # Without a kernel of its own, each channel is a group like any other.
            return copied + weight + (self._weight(1) if self.small else self._each_group())
        copied = _copied(self.value) + _copied(self.result)
        first = self._gradient_of_input() if of_input else 0
        if self.depthwise and not self.small:
            return copied + max(first, self._products())
        # Up to 3 channels are read as they lie, up to 8 are half a block of AVX-512's.
        filled = into if into <= 3 and self.groups == 1 else 8 if into <= 8 else _up(into)
        value = 0 if filled <= 3 else _blocked(self.value, 8 if filled == 8 and self.groups == 1 else _vector())
        blocked = self._weight(filled)
        return copied + max(first, value + _blocked(self.result) + blocked + self._picked() - weight, blocked)

    def _products(self) -> int:
        """The gradient of a depthwise weight by products of matrices: four copies of it, and one channel's columns."""
        kernel, area = math.prod(self.weight.shape[2:]), math.prod(self.result.shape[2:])
        return 4 * _bytes(self.weight) + kernel * area * self.value.element_size() + 256

    def _gradient_of_input(self) -> int:
        """With strides it is made channels last, copied once more, and then laid out as it is wanted."""
        value, weight, blocked = _bytes(self.value), _bytes(self.weight), self._weight(_up(self._into()))
        if self.strided and self.groups == 1:
            return max(2 * value, _bytes(self.result) + blocked) - weight
        if self.strided and self.depthwise and not self.small:
            return max(_blocked(self.value), _blocked(self.result) + blocked) - weight
        return max(0, _blocked(self.result) + blocked + _blocked(self.value) - value - weight)

    def _few(self) -> bool:
        """oneDNN's `is_1stconv`: images of few channels, three colours for example, are read as they lie."""
        into = self._into()
        return self.groups == 1 and (into < 16 if _vector() == 16 else into in (1, 3))

    def _filled(self) -> int:
        return self._into() if self._few() else _up(self._into())

    def _each_group(self) -> int:
        """A copy of the weight in which each group is filled up to blocks, of what it reads and of what it writes."""
        out, into, *kernel = self.weight.shape
        area = math.prod(kernel) * self.weight.element_size()
        return self.groups * _up(out // self.groups) * _up(into) * area

    def _into(self) -> int:
        """Channels that are read for one that is written."""
        return int(self.weight.shape[1])

    def _weight(self, into: int) -> int:
        """A copy of the weight in blocks, where so many channels are read. Groups that fill no block are not filled."""
        out, _, *kernel = self.weight.shape
        if self.groups > 1 and not self.depthwise:
            return _bytes(self.weight)
        return _up(out) * (1 if self.depthwise else into) * math.prod(kernel) * self.weight.element_size()

    def _picked(self) -> int:
        """What a strided product of matrices reads of one image, for each thread: oneDNN's `rtus`."""
        if max(self.weight.shape[2:]) > 1 or not self.strided:
            return 0
        area = math.prod(self.result.shape[2:]) * self.value.element_size()
        return torch.get_num_threads() * _up(self.value.shape[1]) * area

    def _columns(self) -> int:
        """The patch of the image that each number of the result is made of. A product of matrices needs none."""
        if max(*self.weight.shape[2:], *self.steps) == 1:
            return 0
        patches = self.value.shape[0] * math.prod(self.weight.shape[1:]) * math.prod(self.result.shape[2:])
        return patches * self.value.element_size()


@dataclass(frozen=True, slots=True)
class _Transposed:
    """A transposed convolution of `value`, which gives `result`, or gets its gradient."""

    value: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor

    def forward(self) -> int:
        """A copy of the input and one of the weight; then two of the result, one of which gets the bias."""
        return max(2 * _bytes(self.result), _blocked(self.value) + _bytes(self.weight))

    def backward(self) -> int:
        """Copies of the gradient and of the input, or the gradient of the weight in blocks."""
        return _copied(self.result) + max(_blocked(self.result) + _blocked(self.value), _bytes(self.weight))


def _batch_norm_backward(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The gradient of the input a second time, where the input and the result's gradient lie alike.

    `batch_norm_backward_cpu_template` in aten/src/ATen/native/Normalization.cpp makes it for any layout; for these it
    makes another one, and only then lets the first one go.
    """
    value, gradient = argument(func, args, kwargs, "input"), argument(func, args, kwargs, "grad_out")
    wanted = argument(func, args, kwargs, "output_mask")[0]
    layouts = [torch.contiguous_format, *_CHANNELS_LAST.get(value.dim(), ())]
    alike = any(all(each.is_contiguous(memory_format=layout) for each in (value, gradient)) for layout in layouts)
    return _bytes(value) if wanted and alike else 0


def _layer_norm_backward(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Sums for the weight and the bias, in each thread.

    `LayerNormBackwardKernelImplInternal` in aten/src/ATen/native/cpu/layer_norm_kernel.cpp.
    """
    gradient, wanted = argument(func, args, kwargs, "grad_out"), argument(func, args, kwargs, "output_mask")
    width = math.prod(argument(func, args, kwargs, "normalized_shape"))
    return int(2 * torch.get_num_threads() * width * max(4, gradient.element_size())) if any(wanted[1:]) else 0


def _safe_softmax(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Which scores are masked, and which rows altogether: `_safe_softmax` in transformers/attention.cpp."""
    scores = args[0]
    return int(scores.numel() + scores.numel() // max(1, scores.shape[args[1]]) + scores.element_size())


def _roll(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Each dimension but the last is rolled into another copy: `roll_common` in TensorTransformations.h."""
    return _bytes(args[0]) if len(argument(func, args, kwargs, "dims")) > 1 else 0


def _attention(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Blocks of scores, for each thread: `cpu_flash_attention` in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.

    Forward with their maxima, their sums and a block of the result; backward twice, with a sum, and a copy of a
    gradient whose heads do not lie side by side. In 32 bits: blocks of 16 are copied besides.
    """
    query, key, _ = query_key_value(func, args, kwargs)
    length, width = query.shape[2:]
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    scores, copied = rows * min(key.shape[2], 512), 0
    each = scores + rows * (2 + width)
    if func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        each, copied = 2 * scores + rows, _copied(argument(func, args, kwargs, "grad_out").transpose(1, 2))
    return int(torch.get_num_threads() * each * max(4, query.element_size())) + copied


def _copied(tensor: torch.Tensor) -> int:
    """Bytes of a copy of what is laid out otherwise: as a part of another tensor, for example."""
    return 0 if tensor.is_contiguous() else _bytes(tensor)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _blocked(tensor: torch.Tensor, block: int | None = None) -> int:
    """Bytes of a copy of images in blocks of channels, as long as a vector or a given number."""
    images, channels, *area = tensor.shape
    return int(images) * _up(int(channels), block) * math.prod(area) * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _up(channels: int, block: int | None = None) -> int:
    block = block or _vector()
    return -(-channels // block) * block


@cache
def _vector() -> int:
    """Numbers of 32 bits in a vector of this CPU."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


_OTHERS: dict[Any, Callable[[torch._ops.OpOverload, Sequence[Any], Mapping[str, Any]], int]] = {
    aten._safe_softmax: _safe_softmax,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention,
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten.roll: _roll,
}
_COPIED = {
    aten._softmax: ("self",),
    aten.col2im: ("self",),
    aten.embedding: ("indices",),
    aten.embedding_dense_backward: ("grad_output", "indices"),
    aten.im2col: ("self",),
    aten.max_pool2d_with_indices_backward: ("grad_output",),
    aten.native_layer_norm: ("input",),
    aten.native_layer_norm_backward: ("grad_out", "input"),
    aten.upsample_bilinear2d_backward: ("grad_output",),
}
"""What kernels copy first if it is not contiguous, by the names of arguments."""
