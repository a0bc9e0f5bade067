"""Saved tensors packed without loss: what comes back has the same bits.

Three kinds of tensors can be packed whatever the numbers of a batch are, so that what was measured holds for every
step: booleans, which are bits; indices of places, such as those of max pooling, which are 64 bits wide and need 8 to
32; and the masks of dropout, which on a CPU are floating tensors of 0 and 1/(1 - p). Other tensors may happen to be
packable in one step, such as the zeros that a layer makes before its first step, and are left alone.

Of the result of ReLU and of the input of leaky ReLU, the sign is kept, as bits, where nobody else needs its numbers:
before dropout and pooling, or between a norm and a leaky ReLU. A convolution or a product that follows saves the same
tensor and needs them. To keep those that are not 0, as Gist does, takes as many bytes as the batch has of them, which
no plan can promise.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

from rotor_py.stage.keepers.bits import packed_bits, unpacked_bits
from rotor_py.stage.keepers.converted import Converted
from rotor_py.stage.keepers.form_keeper import SmallerKept
from rotor_py.stage.keepers.readers import Need

_INTEGERS = (torch.uint8, torch.int16, torch.uint16, torch.int32)
"""From the narrowest; of two that are as wide, the one that is converted faster."""
_MARGIN = 1.25
"""How much larger indices may get before another type is needed. Max pooling does not point to every place of a plane,
but to some in its last rows, which are in its last fifth for all planes that need more than a byte."""
_SAMPLE = 1024
"""Elements that are looked at before a whole tensor is: nearly all of those that are no masks are known by them."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes, for tensors to be compared bit by bit: -0.0 equals 0.0, and NaN does not equal itself."""
_INFINITY = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
"""The integer with the bits of infinity. Those of positive numbers are smaller, and those of NaN are greater; with the
highest bit set, all of them are negative."""
_FORMATS = {torch.float16: ("e", "h"), torch.float32: ("f", "i"), torch.float64: ("d", "q")}
"""Of a dtype and of its integer, what `struct` calls them."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Keeps booleans, masks and signs as bits, and integers in the narrowest type that holds them."""

    name: str = "packed"
    exact: bool = True

    def keep(self, memory: torch.Tensor) -> SmallerKept | None:
        """What is packed of `memory`; None if it does not get smaller."""
        if memory.dtype == torch.bool:
            return _Bits(packed_bits(memory), memory.numel())
        if memory.is_floating_point():
            return _mask(memory)
        return _narrow(memory)

    def keep_sign(self, memory: torch.Tensor, need: Need) -> SmallerKept | None:
        """Which numbers of `memory` are positive, as it is needed; None for numbers of a kind of their own."""
        if memory.dtype not in _INFINITY:
            return None
        # As integers: to compare numbers would be a decision, which a stage that runs again has to find as it was.
        integer, infinity = _BITS[memory.element_size()], _INFINITY[memory.dtype]
        bits, minus_zero = memory.view(integer), torch.iinfo(integer).min
        if need is Need.POSITIVE_OR_NAN:
            where = bits.ne(0).logical_and_(bits.gt(minus_zero + infinity))
        elif need is Need.POSITIVE:
            where = bits.gt(0).logical_and_(bits.le(infinity))
        else:
            where = bits.ge(0).logical_and_(bits.le(infinity)).logical_or_(bits.eq(minus_zero))
        return _Sign(packed_bits(where), memory.numel(), memory.dtype, -1 if need is Need.NOT_NEGATIVE else 0)


@dataclass(frozen=True, slots=True)
class _Bits:
    """Booleans."""

    bits: torch.Tensor
    count: int

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def tensor(self) -> torch.Tensor:
        return unpacked_bits(self.bits, self.count)


@dataclass(frozen=True, slots=True)
class _Mask:
    """Elements that are 0 or one other number, whose bits are those of the integer `other`."""

    bits: torch.Tensor
    count: int
    other: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def tensor(self) -> torch.Tensor:
        found = unpacked_bits(self.bits, self.count).to(_BITS[self.dtype.itemsize])
        return found.mul_(self.other).view(self.dtype)


@dataclass(frozen=True, slots=True)
class _Sign:
    """Numbers of which is known where they are positive: these come back as 1, and all others as `other`."""

    bits: torch.Tensor
    count: int
    dtype: torch.dtype
    other: int

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def tensor(self) -> torch.Tensor:
        found = unpacked_bits(self.bits, self.count).to(self.dtype)
        return found if self.other == 0 else found.mul_(1 - self.other).add_(self.other)


def _narrow(memory: torch.Tensor) -> Converted | None:
    if memory.dtype not in (torch.int64, torch.int32) or not memory.numel():
        return None
    low, high = (int(each) * _MARGIN for each in torch.stack(memory.aminmax()).tolist())
    for dtype in _INTEGERS:
        limits = torch.iinfo(dtype)
        if dtype.itemsize < memory.element_size() and limits.min <= low and high <= limits.max:
            return Converted(memory.to(dtype), memory.dtype)
    return None


def _mask(memory: torch.Tensor) -> _Mask | None:
    # Elsewhere, dropout keeps booleans, and to look at numbers is to wait for the device.
    if memory.device.type != "cpu" or memory.element_size() not in _BITS:
        return None
    bits = memory.view(_BITS[memory.element_size()])
    if not bits.numel() or not _may_be_mask(bits[:_SAMPLE], memory.dtype):
        return None
    low, other = (int(each) for each in bits.aminmax())
    # Zeros alone, or ones, are no mask of dropout, and may be something else in the next step.
    if low < 0 or not other or (low == other and _number(other, memory.dtype) == 1):
        return None
    where = bits == other
    if int(where.count_nonzero()) != int(bits.count_nonzero()):
        return None
    return _Mask(packed_bits(where), memory.numel(), other, memory.dtype)


def _may_be_mask(sample: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the first elements of a tensor, as integers, are 0 or one number that a mask of dropout may have."""
    low, other = (int(each) for each in sample.aminmax())
    if low < 0 or (other and not 1 <= _number(other, dtype) < math.inf):
        return False
    return bool(((sample == 0) | (sample == other)).all())


def _number(bits: int, dtype: torch.dtype) -> float:
    """The number of a dtype whose bits are those of an integer.

    No operator of torch: a stage that runs again would take that for a decision of its own (`stage.decisions`).
    """
    if dtype is torch.bfloat16:  # the upper half of a float32
        bits, dtype = bits << 16, torch.float32
    if dtype not in _FORMATS:
        return float(bits)
    number, integer = _FORMATS[dtype]
    (found,) = struct.unpack(number, struct.pack(integer, bits))
    return float(found)
