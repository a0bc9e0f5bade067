"""Bytes that the CPU's convolutions allocate for themselves while they run: what oneDNN turns around.

PyTorch has oneDNN run them, which reads and writes channels in blocks of a vector's length, and copies what is laid out
otherwise. Found by experiment: a memory meter around single calls, forward and backward, of 1 to 32 images of 6 to 64
pixels, 3 to 768 channels, kernels of 1 to 11, with strides and dilation, with 1 and 2 threads, which makes no
difference, in both layouts, with torch 2.13 on AVX-512. These rules give what was seen to within 3 % for most, and
assume that vectors of other lengths differ in nothing else. 32 bits alone were looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rotor_py.devices.operators import argument

aten = torch.ops.aten


def cpu_scratch_bytes(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """The bytes that `func` holds on the CPU beyond what it is given and what it returns. 0 where none are known of."""
    packet = func.overloadpacket
    if packet not in (aten.convolution, aten.convolution_backward):
        return 0
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
    convolution = _Convolution(value, weight, result, groups, steps)
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

    @property
    def channels_last(self) -> bool:
        """Whether oneDNN runs it on channels last: as the input or the weight is."""
        return any(_is_channels_last(each) and not each.is_contiguous() for each in (self.value, self.weight))

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.value.shape[1] == self.result.shape[1]

    @property
    def product(self) -> bool:
        """Whether it is a plain product of matrices: these are read as they lie."""
        return self.groups == 1 and max(*self.weight.shape[2:], *self.steps) == 1

    @property
    def small(self) -> bool:
        """Whether there is a kernel of its own for it, if it is depthwise: for 3 × 3."""
        return max(self.weight.shape[2:]) <= 3 and max(self.steps[len(self.steps) // 2 :]) == 1

    def forward(self) -> int:
        """While it runs, there are copies in blocks of all three; then the result is laid out as it is wanted."""
        if self.product:
            return 0
        if self.channels_last:
            return self._weight() if self.depthwise else _bytes(self.weight) + self._weight()
        result = _blocked(self.result)
        return max(self._input() + self._weight() + result - _bytes(self.result), result)

    def backward(self, of_input: bool) -> int:
        """The gradient of the input comes first, then that of the weight."""
        if self.product:
            return 0
        weight, blocked = _bytes(self.weight), self._weight()
        if self.channels_last:
            # The result's gradient is copied if it lies otherwise.
            copied = 0 if _is_channels_last(self.result) else _bytes(self.result)
            if not self.depthwise:
                return copied + 2 * weight + blocked
            # Without a kernel of its own, each channel is a group like any other, filled up to a block of blocks.
            return copied + weight + (blocked if self.small else weight * _vector() ** 2)
        copied = _copied(self.result)
        gradient = _blocked(self.result)
        first = max(0, gradient + blocked + self._input() - _bytes(self.value) - weight) if of_input else 0
        if self.depthwise and not self.small:
            return copied + first  # the second is a product of matrices, with little beside
        return copied + max(first, self._input() + gradient + blocked - weight, blocked)

    def _input(self) -> int:
        """A copy of the input in blocks. An image of three colours is read as it lies."""
        return 0 if self.value.shape[1] <= 3 else _blocked(self.value)

    def _weight(self) -> int:
        """A copy of the weight in blocks: of channels, of both kinds unless each has a group of its own."""
        out, into, *kernel = self.weight.shape
        area = math.prod(kernel) * self.weight.element_size()
        if self.depthwise:
            return _up(out) * area
        return self.groups * _up(out // self.groups) * (into if into <= 3 else _up(into)) * area


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


def _copied(gradient: torch.Tensor) -> int:
    """Bytes of a copy of a gradient that is laid out otherwise, as a part of another one is, for example."""
    return 0 if gradient.is_contiguous() else _bytes(gradient)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _blocked(tensor: torch.Tensor) -> int:
    """Bytes of a copy of images in blocks of channels."""
    images, channels, *area = tensor.shape
    return int(images) * _up(int(channels)) * math.prod(area) * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _up(channels: int) -> int:
    return -(-channels // _vector()) * _vector()


@cache
def _vector() -> int:
    """Numbers of 32 bits in a vector of this CPU."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
