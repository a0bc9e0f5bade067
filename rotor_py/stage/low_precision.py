"""Round saved tensors to bf16, fp8 or int8, where `keep=` asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rotor_py.stage.compression import Converted, Packed, SmallerKept
from rotor_py.stage.replayed_routing import not_deciding
from rotor_py.stage.saved_tensors import Need
from rotor_py.stage.storage_modes import parted
from rotor_solver import Chain, ForwardEnable, Sequence

# Saved floating tensors in fewer bits than their own: what comes back is rounded. Only for those who ask for it.
#
# The forward has computed with the exact numbers, and only gradients are made of the rounded ones. What can be packed
# without loss is (`packed`), and everything else is rounded: to bfloat16, whose range is that of float32; or to eight
# bits, with a scale for each block of 128 numbers that are side by side in memory. Blocks, and not channels: a channel
# of
# an activation is a column, whose numbers are far apart and may come from a thousand tokens, of which one may be large;
# and a storage that several views share has no channels of its own.
#
# A tensor with a number that is not finite, or that would not be, is kept as it is.



BLOCK = 128
"""Numbers that share a scale: the rows of activations are multiples of it, and a scale adds 3 % to what it scales."""
_CHUNK = 2**20
"""Numbers that are rounded at once, so that what that needs beside the tensor stays small."""


@dataclass(frozen=True, slots=True)
class FewerBits:
    """Keeps floating tensors in `dtype` if that is narrower, and packs what can be packed without loss."""

    word: str
    dtype: torch.dtype
    exact: bool = False

    @property
    def name(self) -> str:
        """That of the way to store a stage: what follows "stored"."""
        return f"in {self.word}"

    def keep(self, memory: torch.Tensor) -> SmallerKept | None:
        """What is kept of `memory`; None if it does not get smaller, or would not be finite."""
        packed = Packed().keep(memory)
        if packed is not None:
            return packed
        if not memory.is_floating_point() or memory.element_size() <= self.dtype.itemsize:
            return None
        with not_deciding():  # whether numbers can be rounded, and to which integers
            return _rounded(memory, self.dtype) if self.dtype.itemsize > 1 else _scaled(memory, self.dtype)

    def keep_sign(self, memory: torch.Tensor, need: Need) -> SmallerKept | None:
        """Which numbers of `memory` are positive: that takes fewer bits than any number, and loses nothing."""
        return Packed().keep_sign(memory, need)


FEWER_BITS = {
    form.word: form
    for form in (
        FewerBits("bf16", torch.bfloat16),
        FewerBits("fp8", torch.float8_e4m3fn),
        FewerBits("int8", torch.int8),
    )
}
"""By the words that ask for them."""
_WORDS = {form.name: word for word, form in FEWER_BITS.items()}


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Blocks in eight bits, what each of them was divided by, and what is left beyond the last block."""

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
    if memory.numel() and not bool(torch.stack(memory.aminmax()).to(dtype).isfinite().all()):  # NaN is both of them
        return None
    return Converted(memory.to(dtype), memory.dtype)


def _scaled(memory: torch.Tensor, dtype: torch.dtype) -> _Scaled | None:
    blocked = memory.numel() // BLOCK * BLOCK
    precise = torch.promote_types(memory.dtype, torch.float32)
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scales = torch.linalg.vector_norm(memory[:blocked].view(-1, BLOCK), torch.inf, dim=1, dtype=precise).div_(largest)
    if not bool(scales.isfinite().all()):
        return None
    scales.clamp_(min=torch.finfo(precise).tiny)  # blocks of zeros, and of numbers that are next to nothing
    values = torch.empty(blocked, dtype=dtype, device=memory.device)
    for start, stop in _chunks(blocked):
        block = memory[start:stop].view(-1, BLOCK) / scales[start // BLOCK : stop // BLOCK, None]
        block.clamp_(-largest, largest)  # the division may round up
        values[start:stop].view(-1, BLOCK).copy_(block if dtype.is_floating_point else block.round_())
    return _Scaled(values, scales, memory[blocked:].clone())


def _chunks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]


def word_of(ways: Iterable[str]) -> str | None:
    """The word that asks for ways to store a stage of these names; None if all of them are exact.

    They are exact if the backward reads what the forward has computed, bit for bit.
    """
    return next((_WORDS[keeper] for way in ways if (keeper := parted(way, _WORDS)[1]) is not None), None)


def rounded_stages(chain: Chain, sequence: Sequence) -> dict[int, str]:
    """The stages that `sequence` keeps in fewer bits at any time, with the word that asks for it (`keep=`)."""
    found = {}
    for operation in (each for one in (sequence, *sequence.beside) for each in one):
        if isinstance(operation, ForwardEnable):
            word = word_of([chain.stages[operation.stage].options[operation.option].name])
            if word is not None:
                found[operation.stage] = word
    return found
