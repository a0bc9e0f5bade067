"""Forms with fewer bytes: packed without loss, and rounded on request."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from rotor_profiling.storage import storages, tensors_in
from rotor_profiling.torch_classes import is_fake
from rotor_py.stage.compressing_hooks import LEAST_BYTES, Form, Keeping, is_plain
from rotor_py.stage.protocol import Run, offers_of
from rotor_py.stage.saved_tensors import Kept, Need, Saved
from rotor_py.stage.storage_modes import Trial


@dataclass(frozen=True, slots=True)
class Converted:
    """The `values` of a tensor whose own dtype is `dtype`."""

    values: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes in which it is kept."""
        return self.values.nbytes

    def tensor(self) -> torch.Tensor:
        """A tensor of these values in its own dtype."""
        return self.values.to(self.dtype)


# Booleans as bits, eight to a byte.
#
# Eight booleans are eight bytes of 0 or 1, which are one integer of 64 bits. A multiplication brings their lowest bits
# side by side into its highest byte; another one spreads a byte, and a mask takes one bit of each copy. So a few passes
# over n/8 integers do the work, with vector instructions, on every device.


_GATHER = 0x0102040810204080
"""byte i times the byte 7 - i of this, 2**i, is what adds up in the highest byte; no sum carries into another byte"""
_COPIES = 0x0101010101010101
_ONE_OF_EACH = 0x8040201008040201 - 2**64
"""bit i of byte i; the same bits as a signed integer"""
_CARRY = 0x7F7F7F7F7F7F7F7F
"""added to a byte, this sets its highest bit if the byte is not 0"""


def packed_bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of flat booleans, as uint8. Up to seven values beyond a multiple of eight are bytes of their own."""
    count = values.numel()
    whole = count // 8
    bits = torch.empty(whole + count % 8, dtype=torch.uint8, device=values.device)
    if whole:
        integers = values[: 8 * whole].view(torch.int64) * _GATHER
        bits[:whole] = integers.bitwise_right_shift_(56).bitwise_and_(0xFF)
    bits[whole:] = values[8 * whole :]
    return bits


def unpacked_bits(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` booleans of which `packed_bits` made `bits`."""
    whole = count // 8
    values = torch.empty(count, dtype=torch.bool, device=bits.device)
    if whole:
        integers = values[: 8 * whole].view(torch.int64)
        integers.copy_(bits[:whole])
        integers.mul_(_COPIES).bitwise_and_(_ONE_OF_EACH).add_(_CARRY)
        integers.bitwise_right_shift_(7).bitwise_and_(_COPIES)
    values[8 * whole :] = bits[whole:]
    return values


K = TypeVar("K", bound=Keeping)

_STATISTICS = 16
"""What is saved of a stage and is this much smaller than its input is one number for each row: a mean, or the logarithm
of a sum. All numbers of a row are computed with it, so it is not rounded, and it is hardly any memory. Rows are longer
than this, as a rule: the smallest heads of attention have 32 numbers."""
_LEAST_SHARE = 0.02
"""The part of what is saved that a form has to spare, for its bytes to be measured: of a stage that is stored in part,
it may be several times as much."""


class SmallerKept(Kept, Protocol):
    """A tensor in fewer bytes."""

    @property
    def nbytes(self) -> int:
        """The bytes in which it is kept."""
        ...


class SmallerForm(Form, Protocol):
    """A form that takes fewer bytes than a tensor itself, in the same memory."""

    def keep(self, memory: torch.Tensor) -> SmallerKept | None:
        """Keep `memory`, as `Form` does; None if it would not get smaller."""
        ...

    def keep_sign(self, memory: torch.Tensor, need: Need) -> SmallerKept | None:
        """Keep which numbers of `memory` are positive, as `FormOfSigns` does."""
        ...


@dataclass(frozen=True, slots=True)
class FormKeeper:
    """Keeps what autograd saves in the forward of a stage in a form."""

    form: SmallerForm
    keeps_the_rest: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """That of the form."""
        return self.form.name

    def suits(self, function: Callable[..., Any]) -> bool:
        """Whether hooks see what autograd saves of a stage: what compiled code saves, it decides by itself."""
        return offers_of(function).saves_through_hooks

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        """`run`, a run of `function`, so that what its graph saves is in this form. It makes the same values."""

        def kept(value: Any) -> Any:
            with self._keeping(self.form, function, value, Keeping) as keeping:
                output = run(value)
                keeping.spare(tensors_in(output))
            return output

        return kept

    def trial(self, function: Callable[..., Any]) -> Trial:
        """Tells whether the form spares a part of what is saved that is worth measuring, by a run of `function`."""
        return _Trial(self, function)

    def _keeping(self, form: Form, function: Callable[..., Any], value: Any, kind: type[K]) -> K:
        inputs = tensors_in(value)
        largest = max((each.untyped_storage().nbytes() for each in inputs), default=0)
        least = LEAST_BYTES if self.form.exact else max(LEAST_BYTES, largest // _STATISTICS)
        return kind(form, [*inputs, *_owned(function)], least_bytes=least)


class _Trial:
    """A run of a stage whose graph saves everything as it is, and what it would save in the form of `keeper`."""

    def __init__(self, keeper: FormKeeper, function: Callable[..., Any]) -> None:
        self.pays = False
        self.saved_bytes: int | None = None
        self._keeper, self._function = keeper, function

    def watch(self, run: Run) -> Run:
        """`run`, which is watched."""

        def watched(value: Any) -> Any:
            tried = _Tried(self._keeper.form)
            noting = self._keeper._keeping(tried, self._function, value, _Noting)
            with noting:
                output = run(value)
                noting.settle(tensors_in(output))
            outputs = {each.untyped_storage()._cdata for each in tensors_in(output)}
            saved = sum(plain for plain, _ in tried.storages.values())
            spared = sum(plain - kept for address, (plain, kept) in tried.storages.items() if address not in outputs)
            self.pays = spared >= _LEAST_SHARE * saved and spared > 0
            there = storages(tensors_in([value, output, _owned(self._function)]))
            self.saved_bytes = sum(size for address, size in noting.seen.items() if address not in there)
            tried.let_go()  # the graph holds it for as long as it is there itself
            return output

        return watched


class _Noting(Keeping):
    """Notes all storages that autograd saves, and their bytes."""

    def __init__(self, form: Form, untouched: Iterable[torch.Tensor], *, least_bytes: int) -> None:
        super().__init__(form, untouched, least_bytes=least_bytes)
        self.seen: dict[int, int] = {}

    def save(self, tensor: torch.Tensor, *, for_numbers: bool = False) -> Saved:
        """As `Keeping` does."""
        if is_plain(tensor) or is_fake(tensor):
            self.seen.update(storages([tensor]))
        return super().save(tensor, for_numbers=for_numbers)


def _owned(function: Callable[..., Any]) -> list[torch.Tensor]:
    return [*function.parameters(), *function.buffers()] if isinstance(function, nn.Module) else []


class _Tried:
    """A form that keeps nothing, and notes what another one would."""

    exact = True

    def __init__(self, form: SmallerForm) -> None:
        self.name = form.name
        self.storages: dict[int, tuple[int, int]] = {}
        """of each, by its address: its bytes, and those in the other form that it is kept in at last"""
        self._form = form
        self._memory: list[torch.Tensor] = []  # held, so that no address is used twice

    def let_go(self) -> None:
        """Hold no tensors any more."""
        self._memory.clear()

    def keep(self, memory: torch.Tensor) -> Kept | None:
        """Keep nothing."""
        self._note(memory, self._form.keep(memory))
        return None

    def keep_sign(self, memory: torch.Tensor, need: Need) -> Kept | None:
        """Keep nothing."""
        self._note(memory, self._form.keep_sign(memory, need))
        return None

    def _note(self, memory: torch.Tensor, kept: SmallerKept | None) -> None:
        storage = memory.untyped_storage()
        self._memory.append(memory)
        self.storages[storage._cdata] = storage.nbytes(), storage.nbytes() if kept is None else kept.nbytes


# Saved tensors packed without loss: what comes back has the same bits.
#
# Three kinds of tensors can be packed whatever the numbers of a batch are, so that what was measured holds for every
# step: booleans, which are bits; indices of places, such as those of max pooling, which are 64 bits wide and need 8 to
# 32; and the masks of dropout, which on a CPU are floating tensors of 0 and 1/(1 - p). Other tensors may happen to be
# packable in one step, such as the zeros that a layer makes before its first step, and are left alone.
#
# Of the result of ReLU and of the input of leaky ReLU, the sign is kept, as bits, where nobody else needs its numbers:
# before dropout and pooling, or between a norm and a leaky ReLU. A convolution or a product that follows saves the same
# tensor and needs them. To keep those that are not 0, as Gist does, takes as many bytes as the batch has of them, which
# no plan can promise.


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
