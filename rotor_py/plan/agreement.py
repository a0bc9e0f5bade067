"""Agree on one sequence for all processes that train a model together.

Collectives inside stages (`SyncBatchNorm`, tensor parallelism) repeat when a stage is recomputed, and all processes
must reach them in the same order, so all need the same sequence. Measurements differ. So rank 0 solves for the
costliest stages of any process within the tightest limit, and the others adopt its sequence.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rotor_py.distributed.processes import alone_in_a_prediction
from rotor_py.errors import PlanMismatchError
from rotor_py.measure.budget import Budget
from rotor_py.measure.measurement import costliest
from rotor_py.units import format_bytes
from rotor_solver import Algorithm, Chain, InfeasibleError, Sequence
from rotor_solver.moving import Link


@dataclass(frozen=True, slots=True)
class _Share:
    """One process's share: its stages, its limit, and the bytes of the limit that are not for the chain.

    `link` is its offload bandwidth; None if it does not offload.
    """

    chain: Chain
    mem_limit: int
    fixed_bytes: int
    link: Link | None

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.chain.stages)


def agreed_sequence(
    budget: Budget, mem_limit: int, algorithm: Algorithm, group: dist.ProcessGroup, device: torch.device
) -> Sequence:
    """Find, on rank 0 of `group`, a sequence for the least room of any process. Collective."""
    # Compared before solving: rank 0's sequence is valid only for as many stages.
    own = _Share(budget.chain, mem_limit, budget.fixed.total + budget.snapshot_bytes, budget.link)
    parts = gather_objects(own, group, device)
    _refuse_other_stages(parts)
    room = min(part.mem_limit - part.fixed_bytes for part in parts)
    found: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            links = [part.link for part in parts if part.link is not None]
            link = Link.slowest(links) if len(links) == len(parts) else None
            all_of_them = replace(budget, chain=costliest([part.chain for part in parts]), link=link)
            # The least room, as a limit of this process: `solve` subtracts its own fixed part again.
            found = [all_of_them.solve(min(mem_limit, room + budget.fixed.total + budget.snapshot_bytes), algorithm)]
        except InfeasibleError as error:
            found = [error]  # sent like a sequence: the waiting processes must learn of it
        except Exception as error:
            found = [RuntimeError(f"rank 0 could not solve: {type(error).__name__}: {error}")]
    with _sending_from(device):
        if not alone_in_a_prediction():
            dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    sequence: Sequence | InfeasibleError | RuntimeError = found[0]
    if isinstance(sequence, InfeasibleError):
        raise InfeasibleError(f"rank 0: {sequence}", min_bytes=sequence.min_bytes, mem_limit=sequence.mem_limit)
    if isinstance(sequence, RuntimeError):
        raise sequence
    # Room is not all: a process may need more outside the chain, for example while the optimizer steps.
    peaks = gather_objects((budget.peak_bytes(sequence), mem_limit), group, device)
    # All processes see all peaks, so that all raise and none is left waiting in a collective.
    rank, (peak, limit) = max(enumerate(peaks), key=lambda each: each[1][0] - each[1][1])
    if peak > limit:
        raise InfeasibleError(
            f"the plan of rank 0 would need {format_bytes(peak)} ({peak} bytes) on rank {rank}, whose limit is "
            f"{format_bytes(limit)} ({limit} bytes), so it would run out of memory. Give all processes batches of the "
            f"same shape, or rank {rank} a larger limit.",
            min_bytes=peak,
            mem_limit=limit,
            kind="limit_too_small_on_rank",
        )
    return sequence


def slowest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the largest value of any process in `group`. Collective."""
    found: float = max(gather_objects(seconds, group, device))
    return found


def gather_objects(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return the values of all processes in `group`, in the order of ranks. Collective."""
    if alone_in_a_prediction():
        return [value] * dist.get_world_size(group)
    found: list[Any] = [None] * dist.get_world_size(group)
    with _sending_from(device):
        dist.all_gather_object(found, value, group=group)
    return found


def _sending_from(device: torch.device) -> AbstractContextManager[object]:
    """NCCL sends objects from the current CUDA device, which may differ from the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def refuse_other_plans(sequence: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise PlanMismatchError unless all processes of `group` have the same sequence. Collective."""
    for rank, other in enumerate(gather_objects(sequence, group, device)):
        if other != sequence:
            raise PlanMismatchError("the sequence", sequence, f"{other} on rank {rank}")


def _refuse_other_stages(parts: list[_Share]) -> None:
    for rank, part in enumerate(parts):
        if part.stages != parts[0].stages:
            planned = f"that of rank 0 with {len(parts[0].stages)} stages"
            raise PlanMismatchError("the model", planned, f"one of {len(part.stages)} on rank {rank}")
