"""How much of what stages save could be in another tier of memory until their backward."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from rotor_profiling import isolated, leaves_of
from rotor_profiling.storage import allocated
from rotor_py.stage.keepers.leaving import run_leaving
from rotor_py.stage.runner import StageRunner


class MovableBytes:
    """Bytes by the kind of stage, each found by one run on `device` of the first of its kind.

    They are counted by what moves them in training, so that what is planned with is what will leave.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[Hashable, int] = {}

    def measure(self, kind: Hashable, runner: StageRunner, value: Any) -> None:
        """Run a stage on its input `value`, unless its kind is known."""
        if kind in self._found:
            return
        with isolated(runner.function, self._device), torch.enable_grad():
            output, leaving = run_leaving(runner, leaves_of(value))
            self._found[kind] = sum(allocated(piece.nbytes, self._device.type) for piece in leaving.can_leave())
            del output

    def of(self, kind: Hashable) -> int:
        """The bytes of a stage of a kind that was measured."""
        return self._found[kind]
