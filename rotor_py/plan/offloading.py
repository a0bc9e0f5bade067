"""What plans that move activations need of the tier that they move them to."""

from __future__ import annotations

import logging

import torch
from torch.distributed import ProcessGroup

from rotor_profiling.backends import prediction
from rotor_py.errors import OffloadError, UnsupportedModelError, record_fields
from rotor_py.measure.budget import Budget
from rotor_py.offload.offload import Offload, link_of
from rotor_py.plan.agreement import gather_objects
from rotor_solver import InvalidValueError, Sequence
from rotor_solver.moving import Link

_log = logging.getLogger("rotor_py")


def link_to(offload: Offload, device: torch.device) -> Link:
    """How fast memory of `device` goes to the tier and back. UnsupportedModelError if it cannot go there."""
    kind = "cuda" if offload.name == "host" else "cpu"
    if device.type != kind and prediction() is None:  # tensors of a device that is not there are on the CPU
        other = "file:/path" if kind == "cuda" else "host"
        raise UnsupportedModelError(
            f"offload={offload.name!r} moves memory of {kind} devices, and the model is on {device}; use "
            f"offload={other!r}",
            kind="other_device",
            name="offload",
        )
    return link_of(offload.name, device)


def reserve(offload: Offload, budget: Budget, sequence: Sequence) -> None:
    """Have room in the tier for all that a step by `sequence` moves. OffloadError if there is less."""
    if nbytes := budget.moved_bytes(sequence):
        offload.tier.reserve(nbytes)


def reserve_in_all(
    offload: Offload, budget: Budget, sequence: Sequence, group: ProcessGroup, device: torch.device
) -> None:
    """The same in all processes of `group`, which follow `sequence`. OffloadError in all of them if one has less."""
    refused = ""
    try:
        reserve(offload, budget, sequence)
    except OffloadError as error:
        refused = str(error)
    for rank, each in enumerate(gather_objects(refused, group, device)):
        if each:
            raise OffloadError(f"rank {rank}: {each}", kind="cannot_offload_on_rank", rank=rank)


def prepare_for_file(offload: Offload | None, budget: Budget, sequence: Sequence) -> None:
    """Have room for what a plan from a file moves. ValueError where nobody has said where to, OffloadError if full.

    A warning says so where the plan moves nothing, although it might.
    """
    if sequence.moves is None:
        if offload is not None:
            _log.warning(
                "the plan from the file moves nothing, so offload=%r has nothing to do",
                offload.name,
                extra=record_fields("moves_nothing", name=offload.name),
            )
        return
    if offload is None:
        raise InvalidValueError(
            f"the plan moves activations (it was made with offload={budget.link_name!r}); give offload= here as well, "
            "for where they go",
            kind="no_tier",
            name="offload",
        )
    reserve(offload, budget, sequence)


def tell_of_several_forwards(budget: Budget) -> None:
    """A warning if forwards were noticed that are in flight at once: their plan moves nothing."""
    if budget.link is not None and budget.forwards > 1:
        _log.warning(
            "%d forwards are in flight at once, and plans for several forwards move nothing to another tier: what has "
            "no room is computed again. Go backward after each forward to have offload= count.",
            budget.forwards,
            extra=record_fields("moves_nothing", forwards=budget.forwards),
        )
