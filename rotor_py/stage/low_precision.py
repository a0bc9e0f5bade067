"""Round saved tensors to bf16, fp8 or int8, if `keep=` asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rotor_py.stage.compression import Converted, Packed, SmallerKept
from rotor_py.stage.replayed_routing import not_deciding
from rotor_py.stage.saved_tensors import Need
from rotor_py.stage.storage_modes import parted
from rotor_solver import Chain, ForwardEnable, Sequence

# Saved floating tensors in low precision, rounded; opt-in only.
#
# The forward computes with the exact numbers; only gradients come from rounded ones. Tensors that pack without loss are
# packed (`compression`). All others are rounded to bfloat16, which has the range of float32, or to eight bits with a
# scale for each block of 128 adjacent numbers. Blocks, not channels: a channel of an activation is a column, spread
# over memory and over perhaps a thousand tokens, one of which may be large; and a storage shared by several views has
# no channels.
#
# A tensor that has or would get a non-finite number is saved unchanged.


BLOCK = 128
"""Numbers per scale: rows of activations are multiples of it, and the scales add 3 % to the rounded bytes."""
_CHUNK = 2**20
"""Numbers rounded at once, to bound the temporary memory."""


@dataclass(frozen=True, slots=True)
class FewerBits:
    """Keep floating tensors in `dtype` if that is narrower; pack tensors that pack without loss."""

    word: str
    dtype: torch.dtype
    exact: bool = False

    @property
    def name(self) -> str:
        """Name of the storage mode: the text after "stored"."""
        return f"in {self.word}"

    def keep(self, memory: torch.Tensor) -> SmallerKept | None:
        """Keep `memory`; None if it does not get smaller, or would not be finite."""
        packed = Packed().keep(memory)
        if packed is not None:
            return packed
        if not memory.is_floating_point() or memory.element_size() <= self.dtype.itemsize:
            return None
        with not_deciding():  # whether numbers can be rounded, and to which integers, is no decision of the stage
            return _rounded(memory, self.dtype) if self.dtype.itemsize > 1 else _scaled(memory, self.dtype)

    def keep_sign(self, memory: torch.Tensor, need: Need) -> SmallerKept | None:
        """Keep the signs of `memory`: fewer bits than any number, without loss."""
        return Packed().keep_sign(memory, need)


FEWER_BITS = {
    form.word: form
    for form in (
        FewerBits("bf16", torch.bfloat16),
        FewerBits("fp8", torch.float8_e4m3fn),
        FewerBits("int8", torch.int8),
    )
}
"""By the words that users pass."""
_WORDS = {form.name: word for word, form in FEWER_BITS.items()}


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Blocks in eight bits, their scales, and the unrounded rest after the last block."""

    values: torch.Tensor
    scales: torch.Tensor
    rest: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.rest.nbytes

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
    if memory.numel() and not bool(torch.stack(memory.aminmax()).to(dtype).isfinite().all()):  # NaN is both
        return None
    return Converted(memory.to(dtype), memory.dtype)


def _scaled(memory: torch.Tensor, dtype: torch.dtype) -> _Scaled | None:
    blocked = memory.numel() // BLOCK * BLOCK
    precise = torch.promote_types(memory.dtype, torch.float32)
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scales = torch.linalg.vector_norm(memory[:blocked].view(-1, BLOCK), torch.inf, dim=1, dtype=precise).div_(largest)
    if not bool(scales.isfinite().all()):
        return None
    scales.clamp_(min=torch.finfo(precise).tiny)  # blocks of zeros and of denormal numbers
    values = torch.empty(blocked, dtype=dtype, device=memory.device)
    for start, stop in _chunks(blocked):
        block = memory[start:stop].view(-1, BLOCK) / scales[start // BLOCK : stop // BLOCK, None]
        block.clamp_(-largest, largest)  # the division may round up
        values[start:stop].view(-1, BLOCK).copy_(block if dtype.is_floating_point else block.round_())
    return _Scaled(values, scales, memory[blocked:].clone())


def _chunks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]


def word_of(ways: Iterable[str]) -> str | None:
    """Return the `keep=` word of the first storage mode whose backward reads inexact values; None if all are exact."""
    return next((_WORDS[keeper] for way in ways if (keeper := parted(way, _WORDS)[1]) is not None), None)


def rounded_stages(chain: Chain, sequence: Sequence) -> dict[int, str]:
    """Return the stages that `sequence` ever keeps in low precision, with their `keep=` words."""
    found = {}
    for operation in (each for one in (sequence, *sequence.beside) for each in one):
        if isinstance(operation, ForwardEnable):
            word = word_of([chain.stages[operation.stage].options[operation.option].name])
            if word is not None:
                found[operation.stage] = word
    return found
