"""Tensors that are carried past cuts, followed from the stage that makes them to the last one that uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rotor_profiling import storage_bytes, storages, tensors_in
from rotor_py.measure.measurement import Carried


class CarriedTensors:
    """What is carried, while a chain is measured stage by stage.

    `now` has the carried tensors in the input of the stage that is being measured: name, and position among the input's
    tensors.
    """

    def __init__(self) -> None:
        self.now: Mapping[str, int] = {}
        self._found: dict[str, Carried] = {}

    @property
    def found(self) -> tuple[Carried, ...]:
        """All of them, as far as the chain has been measured."""
        return tuple(self._found.values())

    def addresses(self, value: Any) -> list[int]:
        """The addresses of their storages in `value`, the input of the stage."""
        return list(storages(self._tensors(value)))

    def count_gradients(self, sizes: Sequence[int]) -> None:
        """Note the bytes of the gradients that the stage's backward gives to what was carried into it.

        `sizes` has those of the gradients of all tensors of the input.
        """
        # The largest of all stages: each may return the gradient in a storage of another size, and one number counts.
        for name, position in self.now.items():
            known = self._found[name]
            size = sizes[position]
            self._found[name] = replace(known, gradient_bytes=max(size, known.gradient_bytes))

    def pass_on(self, positions: Mapping[str, int], value: Any, stage: int, owned: Sequence[int]) -> None:
        """Go on to the input `value` of `stage`, where the carried tensors are at `positions`.

        `owned` are the addresses of storages that are already counted: a new tensor may be a view of an old one.
        """
        self.now = positions
        for name, tensor in zip(positions, self._tensors(value), strict=True):
            if name not in self._found:
                self._found[name] = Carried(storage_bytes([tensor], owned), stage, stage)
            self._found[name] = replace(self._found[name], last=stage)

    def _tensors(self, value: Any) -> list[torch.Tensor]:
        """The carried tensors in `value`, the input of the stage."""
        tensors = tensors_in(value)
        return [tensors[position] for position in self.now.values()]
