"""A value that goes from one stage to the next, with some of its tensors in fewer bits: as checkpoints may be kept.

Storages are rounded, not tensors: two tensors may be views of the same memory, and are so again when they come back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from rotor_profiling.storage import local, tensors_in
from rotor_py.stage.keepers.fewer_bits import FEWER_BITS, FewerBits, RoundedTensor
from rotor_py.stage.keepers.keeper import LEAST_BYTES, is_plain
from rotor_py.stage.keepers.saved import memory_of

_log = logging.getLogger("rotor_py")


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of the value: a view of a storage that is rounded."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class RoundedValue:
    """`value` with its tensors at `positions` in fewer bits.

    What has numbers that are not finite stays as it is; then the value is not `complete`.
    """

    __slots__ = ("_leaves", "_spec", "_storages", "complete")

    def __init__(self, value: Any, positions: Collection[int], form: FewerBits) -> None:
        leaves, self._spec = tree_flatten(value)
        self._storages: dict[int, RoundedTensor] = {}
        self._leaves: list[Any] = []
        self.complete = True
        position = 0
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._leaves.append(self._kept(leaf, form) if position in positions else leaf)
                position += 1
            else:
                self._leaves.append(leaf)

    def _kept(self, tensor: torch.Tensor, form: FewerBits) -> torch.Tensor | _View:
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            rounded = form.rounded(memory_of(tensor))
            if rounded is None:
                self.complete = False
                return tensor
            self._storages[key] = rounded
        return _View(key, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def whole(self) -> Any:
        """The value at its full size, rounded."""
        made = {key: kept.tensor() for key, kept in self._storages.items()}

        def back(leaf: Any) -> Any:
            return made[leaf.storage].as_strided(leaf.size, leaf.stride, leaf.offset) if type(leaf) is _View else leaf

        return tree_unflatten([back(leaf) for leaf in self._leaves], self._spec)

    def tensors(self) -> list[torch.Tensor]:
        """What is in memory."""
        rest = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        return [*(part for kept in self._storages.values() for part in kept.parts), *rest]


class Rounding:
    """How inputs of stages are kept in the fewer bits of `word` (`keep=`), where a sequence says so (`CF_3~`).

    Of the input of each stage, the tensors at its `positions` are rounded.
    """

    def __init__(self, word: str, positions: Mapping[int, tuple[int, ...]]) -> None:
        self.word = word
        self.positions = positions
        self._told = False

    def rounded(self, stage: int, name: str, value: Any) -> RoundedValue:
        """`value`, the input of a stage, in fewer bits.

        A tensor with numbers that are not finite stays as it is, which takes memory that no plan counts on: the first
        time, a warning is logged.
        """
        found = RoundedValue(value, self.positions[stage], FEWER_BITS[self.word])
        if not found.complete and not self._told:
            self._told = True
            _log.warning(
                "the input of stage %r has numbers that are not finite, or would not be in %s, so that it is kept "
                "whole: this step may take more memory than planned",
                name, self.word,
            )  # fmt: skip
        return found


def roundable(value: Any, form: FewerBits, held: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The positions, among the tensors of `value`, of those that get smaller in `form` and are nobody else's.

    Not those in storages of tensors that are `held` anyway, in fewer than `LEAST_BYTES`, or seen in two dtypes.
    """
    tensors = tensors_in(value)
    others = {_key(tensor) for tensor in held}
    dtypes: dict[int, set[torch.dtype]] = {}
    for tensor in tensors:
        dtypes.setdefault(_key(tensor), set()).add(tensor.dtype)
        if not is_plain(tensor):
            others.add(_key(tensor))
    return tuple(
        position
        for position, tensor in enumerate(tensors)
        if _key(tensor) not in others
        and len(dtypes[_key(tensor)]) == 1
        and tensor.is_floating_point()
        and tensor.element_size() > form.dtype.itemsize
        and tensor.untyped_storage().nbytes() >= LEAST_BYTES
    )


def _key(tensor: torch.Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)
