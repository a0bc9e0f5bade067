"""Choose which storage modes of stages to measure, which to time, and which to give to the solver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist

from rotor_profiling import StageBytes, StageCost, isolated, leaves_of
from rotor_profiling.stage.cost import clearly_less
from rotor_profiling.storage import allocated
from rotor_profiling.timing import several_processes
from rotor_py.distributed.processes import anywhere, gather_objects
from rotor_py.measure.measurement import Way
from rotor_py.stage.protocol import ELSEWHERE, base_of, both
from rotor_py.stage.runner import StageRunner, run_offloadable


def offered_everywhere(names: Sequence[str], group: dist.ProcessGroup | None, device: torch.device) -> tuple[str, ...]:
    """Return the leading `names` of modes that are equal in all processes. All must call this: it is a collective."""
    every = [names] if group is None else gather_objects(names, group, device)
    shared = takewhile(lambda each: len(set(each)) == 1, zip(*every, strict=False))
    return tuple(name for name, *_ in shared)


def saving_ones(
    whole: StageBytes, ways: Sequence[tuple[str, StageBytes]], group: dist.ProcessGroup | None, device: torch.device
) -> list[tuple[str, StageBytes]]:
    """Return the modes that in any process save clearly fewer bytes (`clearly_less`) than the mode to which they add a
    keeper (`base_of`), or, if that is not among `ways`, than the `whole` stage.
    """
    saved = {name: way.saved_bytes for name, way in ways}
    bases = {name: base_of(name, saved) for name in saved}
    before = {name: whole.saved_bytes if base is None else saved[base] for name, base in bases.items()}
    return [each for each in ways if anywhere(clearly_less(saved[each[0]], before[each[0]]), group, device)]


def worth_choosing(whole: StageCost, ways: Sequence[Way]) -> tuple[Way, ...]:
    """Drop each mode if another one, or storing everything, takes no more bytes of any kind and no more seconds."""
    if several_processes():  # drop none: all processes must have the same modes, but measure different times
        return tuple(ways)
    needs = [_needs(whole), *(_needs(way.cost) for way in ways)]

    def beaten(at: int) -> bool:
        return any(
            all(theirs <= mine for theirs, mine in zip(other, needs[at], strict=True))
            and (other != needs[at] or before < at)
            for before, other in enumerate(needs)
        )

    return tuple(way for at, way in enumerate(ways, 1) if not beaten(at))


def _needs(cost: StageCost) -> tuple[float, ...]:
    scratch = (cost.forward_temp_bytes, cost.backward_temp_bytes, cost.replay_temp_bytes)
    return (
        cost.forward_seconds + cost.backward_seconds,
        cost.saved_bytes,
        *(cost.saved_bytes + each for each in scratch),
        -cost.input_released_bytes,
        -cost.output_released_bytes,
    )


def offloadable_bytes(
    ways: Sequence[str],
    runners: Sequence[StageRunner],
    value: Any,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, int]:
    """Map each storage mode in `ways` to the bytes that a stage with the input `value` can offload in it.

    `runners` has a runner for each mode. Drops modes that can offload nothing in any process of `group`.
    """
    found = [(way, _offloadable_bytes(runner, value, device)) for way, runner in zip(ways, runners, strict=True)]
    return {way: size for way, size in found if anywhere(size > 0, group, device)}


def _offloadable_bytes(runner: StageRunner, value: Any, device: torch.device) -> int:
    with isolated(runner.function, device), torch.enable_grad():
        output, offloadable = run_offloadable(runner, leaves_of(value))
        found = sum(allocated(piece.nbytes, device.type) for piece in offloadable.offloadable())
        del output
    return found


def with_offloading(ways: Iterable[Way], nbytes: Mapping[str, int]) -> tuple[Way, ...]:
    """Return, for each of `ways` in `nbytes`, a further mode that offloads at most that many of its saved bytes."""
    found = []
    for way in ways:
        if way.name in nbytes:
            # Do not count saved bytes that are freed with the output anyway: offloading them would free nothing.
            moved = max(0, min(nbytes[way.name], way.cost.saved_bytes - way.cost.output_released_bytes))
            name = both(way.name, ELSEWHERE.name) if way.name else ELSEWHERE.name
            # All processes must have the same modes: if there are several, add a mode even if it offloads nothing here.
            if moved or several_processes():
                found.append(Way(name, way.cost, moved))
    return tuple(found)
