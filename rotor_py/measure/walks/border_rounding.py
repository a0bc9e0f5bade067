"""What it takes to keep the inputs of stages in fewer bits, as checkpoints: bytes and seconds, measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch

from rotor_profiling import storage_bytes, tensors_in
from rotor_profiling.instruments import memory_meter, stopwatch
from rotor_profiling.timing import seconds_of
from rotor_py.measure.measurement import RoundedBorder, RoundedBorders
from rotor_py.stage.keepers.fewer_bits import FEWER_BITS
from rotor_py.stage.keepers.rounded_value import RoundedValue, roundable


class BorderRounding:
    """Measures the values between stages on `device`, in the fewer bits of `word`, while a walk comes by them.

    Values of the same shapes are measured once.
    """

    def __init__(self, word: str, device: torch.device) -> None:
        self._word, self._form, self._device = word, FEWER_BITS[word], device
        self._known: dict[Hashable, RoundedBorder | None] = {}
        self.begin()

    def anew(self) -> BorderRounding:
        """Another one, for another way to run the same chain."""
        return BorderRounding(self._word, self._device)

    def begin(self) -> None:
        """A walk begins at the first stage, whose input is the caller's."""
        self._of_inputs: list[RoundedBorder | None] = []
        self._handed_on: list[torch.Tensor] = []

    def pass_by(self, value: Any, output: Any, activation_bytes: int, held: Iterable[torch.Tensor]) -> None:
        """Measure `value`, the input of the stage that has made `output`; the chain counts it as `activation_bytes`.

        What a stage hands on from its input to its output is in both, and in memory when one of them is not: it stays
        as it is, and so do the tensors that are `held` throughout.
        """
        shared = _in_both(value, output)
        if self._of_inputs:
            self._of_inputs.append(self._found(value, activation_bytes, [*held, *self._handed_on, *shared]))
        else:
            self._of_inputs.append(None)
        self._handed_on = shared

    def found(self) -> RoundedBorders | None:
        """What the last walk has found; None if nothing gets smaller."""
        return RoundedBorders(self._word, tuple(self._of_inputs)) if any(self._of_inputs) else None

    def _found(self, value: Any, activation_bytes: int, held: list[torch.Tensor]) -> RoundedBorder | None:
        positions = roundable(value, self._form, held)
        shapes = tuple(
            (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.untyped_storage().nbytes())
            for tensor in tensors_in(value)
        )
        key = positions, shapes, activation_bytes
        if key not in self._known:
            self._known[key] = self._measured(value, positions, activation_bytes) if positions else None
        return self._known[key]

    @torch.no_grad()
    def _measured(self, value: Any, positions: tuple[int, ...], activation_bytes: int) -> RoundedBorder | None:
        round_it = partial(RoundedValue, value, positions, self._form)
        with memory_meter(self._device) as meter:
            meter.mark("round")
            rounded = round_it()
            meter.mark("restore")
            whole = rounded.whole()
            meter.mark("after")
        del whole
        rounding, restoring = meter.phases["round"], meter.phases["restore"]
        tensors = tensors_in(value)
        spared = storage_bytes(tensors[position] for position in positions) - rounding.kept
        if not rounded.complete or not 0 < spared <= activation_bytes:
            return None
        with stopwatch(self._device) as watch:
            rounding_seconds, restoring_seconds = (
                seconds_of(partial(_run, make), watch) for make in (round_it, rounded.whole)
            )
        return RoundedBorder(
            positions,
            spared,
            rounding_seconds,
            restoring_seconds,
            # The chain counts what is not rounded in both forms, although it is there once.
            max(0, rounding.rise - (activation_bytes - spared)),
            max(0, restoring.rise - activation_bytes),
        )


def _run(make: Callable[[], object]) -> None:
    make()  # what it makes is let go of at once


def _in_both(value: Any, output: Any) -> list[torch.Tensor]:
    """The tensors of `output` whose memory is that of a tensor of `value`."""
    before = {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}
    return [tensor for tensor in tensors_in(output) if tensor.untyped_storage()._cdata in before]
