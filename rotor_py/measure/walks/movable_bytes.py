"""How much of what stages save could be in another tier of memory until their backward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rotor_profiling import StageCost, isolated, leaves_of
from rotor_profiling.storage import allocated
from rotor_profiling.timing import several_processes
from rotor_py.distributed.processes import anywhere
from rotor_py.measure.measurement import Way
from rotor_py.stage.keepers.leaving import run_leaving
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.ways.elsewhere import ELSEWHERE
from rotor_py.stage.ways.names import both


class MovableBytes:
    """Bytes by the kind of stage, each found by a run on `device` of the first of its kind, in each way to store it.

    They are counted by what moves them in training, so that what is planned with is what will leave. Where a process of
    the `group` can move something of a stage in a way, all of them have that way.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group
        self._found: dict[Hashable, dict[str, int]] = {}

    def measure(self, kind: Hashable, ways: Sequence[str], runners: Sequence[StageRunner], value: Any) -> None:
        """Run a stage on its input `value`, stored whole and in `ways`, unless its kind is known in all processes.

        The first of the `runners` stores it whole, and the others in one of the ways each.
        """
        if not anywhere(kind not in self._found, self._group, self._device):
            return
        found = [(way, self._leaving(runner, value)) for way, runner in zip(("", *ways), runners, strict=True)]
        self._found[kind] = {way: size for way, size in found if anywhere(size > 0, self._group, self._device)}

    def _leaving(self, runner: StageRunner, value: Any) -> int:
        with isolated(runner.function, self._device), torch.enable_grad():
            output, leaving = run_leaving(runner, leaves_of(value))
            found = sum(allocated(piece.nbytes, self._device.type) for piece in leaving.can_leave())
            del output
        return found

    def ways(self, kind: Hashable, whole: StageCost, ways: Iterable[Way]) -> tuple[Way, ...]:
        """The ways to store a stage, `whole` or in `ways`, in which what it saves is elsewhere."""
        known = self._found[kind]
        found = [_elsewhere(way, known[way.name]) for way in (Way("", whole), *ways) if way.name in known]
        # The n-th way has to be the same in all processes.
        return tuple(way for way in found if way.moved_bytes or several_processes())


def _elsewhere(way: Way, nbytes: int) -> Way:
    # What goes with the output cannot leave as well. Where a stage hands its input on, more is counted as that.
    moved = max(0, min(nbytes, way.cost.saved_bytes - way.cost.output_released_bytes))
    return Way(both(way.name, ELSEWHERE.name) if way.name else ELSEWHERE.name, way.cost, moved)
