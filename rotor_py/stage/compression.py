"""Keep saved tensors in fewer bytes: packed without loss, or rounded if the user sets `keep=`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from rotor_profiling.stage.cost import clearly_less
from rotor_profiling.storage import storages, tensors_in
from rotor_py.stage.compressing_hooks import LEAST_BYTES, Form, Keeping, owned_tensors
from rotor_py.stage.protocol import Keeper, Run, Trial, offers_of, parted
from rotor_py.stage.replayed_routing import not_deciding
from rotor_py.stage.saved_tensors import Need, Saved
from rotor_solver import Chain, ForwardEnable, Sequence


@dataclass(frozen=True, slots=True)
class Converted:
    values: torch.Tensor
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        return self.values.to(self.dtype)


# Booleans are packed as bits, eight to a byte.
#
# Eight booleans, a byte each, are read as one 64-bit integer. To pack, its product with `_GATHER` has their lowest bits
# in its highest byte. To unpack a byte, its product with `_COPIES` has eight copies, and a mask takes one bit of each.

# Byte 7 - i is 2**i. The product with byte i of the booleans is bit i of the highest byte. No sum carries into a byte
_GATHER = 0x0102040810204080
_COPIES = 0x0101010101010101
_ONE_OF_EACH = 0x8040201008040201 - 2**64  # mask of bit i in byte i, as a signed integer
_CARRY = 0x7F7F7F7F7F7F7F7F  # 127 in each byte: added to a byte of one bit, sets the highest bit unless the byte is 0


def packed_bits(values: torch.Tensor) -> torch.Tensor:
    """Pack flat booleans into uint8, eight to a byte. A rest of fewer than eight takes a byte each."""
    count = values.numel()
    whole = count // 8
    bits = torch.empty(whole + count % 8, dtype=torch.uint8, device=values.device)
    if whole:
        integers = values[: 8 * whole].view(torch.int64) * _GATHER
        bits[:whole] = integers.bitwise_right_shift_(56).bitwise_and_(0xFF)
    bits[whole:] = values[8 * whole :]
    return bits


def unpacked_bits(bits: torch.Tensor, count: int) -> torch.Tensor:
    whole = count // 8
    values = torch.empty(count, dtype=torch.bool, device=bits.device)
    if whole:
        integers = values[: 8 * whole].view(torch.int64)
        integers.copy_(bits[:whole])
        integers.mul_(_COPIES).bitwise_and_(_ONE_OF_EACH).add_(_CARRY)
        integers.bitwise_right_shift_(7).bitwise_and_(_COPIES)
    values[8 * whole :] = bits[whole:]
    return values


# Saved tensors smaller than the input by this factor are not rounded: they may be statistics of rows, such as a mean or
# a logsumexp, whose error would spread to whole rows. The shortest rows, of small attention heads, have 32 values.
_STATISTICS = 16
# A keeper is worth measuring if it reduces the bytes that autograd saves by at least this share.
_LEAST_SHARE = 0.02


class _Tried:
    """Form that saves tensors unchanged, and records how many bytes the form `packed` would keep of them."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        self.storages: dict[int, tuple[int, int]] = {}  # address: (bytes unchanged, bytes that `packed` would keep)
        self._memory: list[torch.Tensor] = []  # keeps the tensors alive, so that no address is reused

    def keep(self, memory: torch.Tensor) -> None:
        self._note(memory, self._packed.keep(memory))

    def keep_sign(self, memory: torch.Tensor, need: Need) -> None:
        self._note(memory, self._packed.keep_sign(memory, need))

    def _note(self, memory: torch.Tensor, kept: Any) -> None:
        storage = memory.untyped_storage()
        self._memory.append(memory)
        parts = [] if kept is None else tensors_in([getattr(kept, each.name) for each in fields(kept)])
        self.storages[storage._cdata] = storage.nbytes(), sum(each.nbytes for each in parts) or storage.nbytes()


# Lossless packing. Some tensors can be packed in every step, so that their bytes, measured once, hold for all steps:
# booleans, as bits; int64 indices, such as those of max pooling, in 8 to 32 bits; and dropout masks, which on a CPU are
# floating-point tensors of 0 and 1/(1 - p). Tensors that can be packed only in some steps are saved unchanged.
# Of the result of ReLU and the input of leaky ReLU, only sign bits may be kept (Rule 11 in `compressing_hooks`).

# The narrowest type first; of two equally wide types, the one with the faster conversion first.
_INTEGERS = (torch.uint8, torch.int16, torch.uint16, torch.int32)
# Factor by which indices may grow in later steps. Max pooling selects some element in the last 20 % of a large plane.
_MARGIN = 1.25
_SAMPLE = 1024  # number of elements to check first: they rule out nearly all tensors that are no masks
# Integer types by bytes, to compare bits of floating-point values: -0.0 == 0.0, and NaN != NaN.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Packed(Keeper):
    """Keeps booleans, dropout masks and signs as bits, and integers in the narrowest type that holds them.

    It is a storage mode, and the form in which that mode keeps the saved tensors of a stage, on their device.
    """

    name: str = "packed"  # of the storage mode, in plans and reports
    exact: bool = True  # whether each restored tensor equals the saved one bit for bit

    def suits(self, function: Callable[..., Any]) -> bool:
        # Saved-tensor hooks do not see the tensors that compiled code saves.
        return offers_of(function).saves_through_hooks

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        def kept(value: Any) -> Any:
            with self.keeping_in(self, function, value) as keeping:
                output = run(value)
                keeping.spare(tensors_in(output))
            return output

        return kept

    def keeping_in(
        self, form: Form, function: Callable[..., Any], value: Any, seen: dict[int, int] | None = None
    ) -> Keeping:
        """Return the context for a run on `value` whose saved tensors are kept in `form`."""
        inputs = tensors_in(value)
        largest = max((each.untyped_storage().nbytes() for each in inputs), default=0)
        least = LEAST_BYTES if self.exact else max(LEAST_BYTES, largest // _STATISTICS)
        return Keeping(form, [*inputs, *owned_tensors(function)], least_bytes=least, seen=seen)

    def trial(self, run: Run, function: Callable[..., Any], value: Any) -> Trial:
        tried, seen = _Tried(self), dict[int, int]()
        with self.keeping_in(tried, function, value, seen) as keeping:
            output = run(value)
            keeping.settle(tensors_in(output))
        outputs = {each.untyped_storage()._cdata for each in tensors_in(output)}
        saved = sum(plain for plain, _ in tried.storages.values())
        spared = sum(plain - kept for address, (plain, kept) in tried.storages.items() if address not in outputs)
        present = storages(tensors_in([value, owned_tensors(function)]))
        made = storages(tensors_in(output))
        saved_bytes = sum(size for address, size in seen.items() if address not in present and address not in made)
        held = saved_bytes + sum(size for address, size in made.items() if address not in present)
        clearly = clearly_less(held - spared, held) if self.exact else None
        return Trial(spared >= _LEAST_SHARE * saved and spared > 0, saved_bytes, clearly)

    def keep(self, memory: torch.Tensor) -> Saved | None:
        if memory.dtype == torch.bool:
            return _Bits(packed_bits(memory), memory.numel(), unpacked_bits)
        return _mask(memory) if memory.is_floating_point() else _narrow(memory)

    def keep_sign(self, memory: torch.Tensor, need: Need) -> Saved | None:
        """Keep one bit for each element of `memory`: the answer to the question `need`, which is about its sign.

        The restored tensor is 1 where the answer is yes, else 0 or -1. Return None for dtypes that are not packed.
        """
        if not memory.is_floating_point() or memory.element_size() not in _BITS:
            return None
        with not_deciding():  # do not record these comparisons as decisions of the stage
            if need is Need.POSITIVE_OR_NAN:
                where = memory.le(0).logical_not_()
            else:
                where = memory.gt(0) if need is Need.POSITIVE else memory.ge(0)
        restored = partial(_signed, -1 if need is Need.NOT_NEGATIVE else 0, memory.dtype)
        return _Bits(packed_bits(where), memory.numel(), restored)


@dataclass(frozen=True, slots=True)
class _Bits:
    """A tensor kept as one bit per element; `restored` makes it from the bits and the number of elements, `count`."""

    bits: torch.Tensor
    count: int
    restored: Callable[[torch.Tensor, int], torch.Tensor]

    def tensor(self) -> torch.Tensor:
        return self.restored(self.bits, self.count)


def _masked(other: int, dtype: torch.dtype, bits: torch.Tensor, count: int) -> torch.Tensor:
    """Restore a tensor of zeros and one other value, which has the bits of the integer `other`."""
    return unpacked_bits(bits, count).to(_BITS[dtype.itemsize]).mul_(other).view(dtype)


def _signed(other: int, dtype: torch.dtype, bits: torch.Tensor, count: int) -> torch.Tensor:
    found = unpacked_bits(bits, count).to(dtype)
    return found if other == 0 else found.mul_(1 - other).add_(other)


def _narrow(memory: torch.Tensor) -> Converted | None:
    if memory.dtype not in (torch.int64, torch.int32) or not memory.numel():
        return None
    low, high = (int(each) * _MARGIN for each in torch.stack(memory.aminmax()).tolist())
    for dtype in _INTEGERS:
        limits = torch.iinfo(dtype)
        if dtype.itemsize < memory.element_size() and limits.min <= low and high <= limits.max:
            return Converted(memory.to(dtype), memory.dtype)
    return None


def _mask(memory: torch.Tensor) -> _Bits | None:
    # Only on the CPU, dropout masks are floating-point tensors, and reading values does not synchronize with a device.
    if memory.device.type != "cpu" or memory.element_size() not in _BITS:
        return None
    bits = memory.view(_BITS[memory.element_size()])
    if not bits.numel() or not _may_be_mask(bits[:_SAMPLE], memory.dtype):
        return None
    low, other = (int(each) for each in bits.aminmax())
    # A tensor of only zeros or only ones is no dropout mask: its values may differ in the next step.
    if low < 0 or not other or (low == other and _number(other, memory.dtype) == 1):
        return None
    where = bits == other
    if int(where.count_nonzero()) != int(bits.count_nonzero()):
        return None
    return _Bits(packed_bits(where), memory.numel(), partial(_masked, other, memory.dtype))


def _may_be_mask(sample: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `sample`, bits of elements as integers, has only 0 and at most one other value, as in a dropout mask."""
    low, other = (int(each) for each in sample.aminmax())
    if low < 0 or (other and not 1 <= _number(other, dtype) < math.inf):
        return False
    return bool(((sample == 0) | (sample == other)).all())


def _number(bits: int, dtype: torch.dtype) -> float:
    with not_deciding():  # do not record this value as a decision of the stage
        return float(torch.tensor(bits, dtype=_BITS[dtype.itemsize], device="cpu").view(dtype))


# Rounding of saved floating-point tensors, only if the user sets `keep=`.
#
# The forward computes with exact values; only the backward reads rounded ones. Tensors that cannot be packed without
# loss are rounded to bfloat16, which has the range of float32, or to eight bits with a scale for each block of 128
# adjacent elements. A scale for each channel would be too large for most of its tokens if one of them is large, and a
# storage with several views has no channels. A tensor that has or would get an infinity or NaN is saved unchanged.

BLOCK = 128  # elements per scale: divides the length of most rows of activations; scales add 3 % to the rounded bytes
_CHUNK = 2**20  # elements rounded at once, which bounds the temporary memory


@dataclass(frozen=True, slots=True)
class FewerBits(Packed):
    """Packs tensors without loss where `Packed` can, and rounds other floating-point tensors to a narrower `dtype`."""

    exact: bool = False
    dtype: torch.dtype = torch.bfloat16

    def keep(self, memory: torch.Tensor) -> Saved | None:
        packed = Packed.keep(self, memory)  # `super()` without arguments fails in a dataclass with slots
        if packed is not None:
            return packed
        if not memory.is_floating_point() or memory.element_size() <= self.dtype.itemsize:
            return None
        with not_deciding():  # do not record operators of this function as decisions of the stage
            return _rounded(memory, self.dtype) if self.dtype.itemsize > 1 else _scaled(memory, self.dtype)


_WORDS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Maps each value of `keep=` to its form.
FEWER_BITS = {word: FewerBits(f"in {word}", dtype=dtype) for word, dtype in _WORDS.items()}


@dataclass(frozen=True, slots=True)
class _Scaled:
    """`values` of whole blocks in eight bits, a scale for each block, and the exact elements after the last one."""

    values: torch.Tensor
    scales: torch.Tensor
    rest: torch.Tensor

    def tensor(self) -> torch.Tensor:
        blocked = self.values.numel()
        found = self.rest.new_empty(blocked + self.rest.numel())
        found[blocked:] = self.rest
        for start, stop in _chunks(blocked):
            scales = self.scales[start // BLOCK : stop // BLOCK]
            block = self.values[start:stop].view(-1, BLOCK).to(scales.dtype)
            found[start:stop].view(-1, BLOCK).copy_(block.mul_(scales[:, None]))
        return found


def _rounded(memory: torch.Tensor, dtype: torch.dtype) -> Converted | None:
    if memory.numel() and not bool(torch.stack(memory.aminmax()).to(dtype).isfinite().all()):  # or NaN
        return None
    return Converted(memory.to(dtype), memory.dtype)


def _scaled(memory: torch.Tensor, dtype: torch.dtype) -> _Scaled | None:
    blocked = memory.numel() // BLOCK * BLOCK
    precise = torch.promote_types(memory.dtype, torch.float32)
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scales = torch.linalg.vector_norm(memory[:blocked].view(-1, BLOCK), torch.inf, dim=1, dtype=precise).div_(largest)
    if not bool(scales.isfinite().all()):
        return None
    scales.clamp_(min=torch.finfo(precise).tiny)  # a scale of 0, of a block of zeros or denormal values, would give NaN
    values = torch.empty(blocked, dtype=dtype, device=memory.device)
    for start, stop in _chunks(blocked):
        block = memory[start:stop].view(-1, BLOCK) / scales[start // BLOCK : stop // BLOCK, None]
        block.clamp_(-largest, largest)  # the division may round up to more
        values[start:stop].view(-1, BLOCK).copy_(block if dtype.is_floating_point else block.round_())
    return _Scaled(values, scales, memory[blocked:].clone())


def _chunks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]


def word_of(ways: Iterable[str]) -> str | None:
    """Return the value of `keep=` of the first storage mode in `ways` that rounds; None if no mode rounds."""
    words = {form.name: word for word, form in FEWER_BITS.items()}
    return next((words[keeper] for way in ways if (keeper := parted(way, words)[1]) is not None), None)


def rounded_stages(chain: Chain, sequence: Sequence) -> dict[int, str]:
    """Map the index of each stage whose saved tensors `sequence` rounds to the value of `keep=` that rounds them."""
    enabled = [each for one in (sequence, *sequence.beside) for each in one if isinstance(each, ForwardEnable)]
    ways = [(each.stage, chain.stages[each.stage].options[each.option].name) for each in enabled]
    return {stage: word for stage, way in ways if (word := word_of([way])) is not None}
