"""Prepare the offload tier for a plan: bandwidth, and room for the offloaded bytes."""

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
    """Return the bandwidth from `device` to the tier and back. UnsupportedModelError if the device has no way to it."""
    kind = "cuda" if offload.name == "host" else "cpu"
    if device.type != kind and prediction() is None:  # tensors of a simulated device are on the CPU
        other = "file:/path" if kind == "cuda" else "host"
        raise UnsupportedModelError(
            f"offload={offload.name!r} moves memory of {kind} devices, and the model is on {device}; use "
            f"offload={other!r}",
            kind="other_device",
            name="offload",
        )
    return link_of(offload.name, device)


def reserve(offload: Offload, budget: Budget, sequence: Sequence) -> None:
    """Reserve room in the tier for a step by `sequence`. Raises OffloadError if there is less."""
    if nbytes := budget.moved_bytes(sequence):
        offload.tier.reserve(nbytes)


def reserve_in_all(
    offload: Offload, budget: Budget, sequence: Sequence, group: ProcessGroup, device: torch.device
) -> None:
    """Reserve in all processes of `group`, which follow `sequence`. OffloadError in all if one lacks room."""
    refused = ""
    try:
        reserve(offload, budget, sequence)
    except OffloadError as error:
        refused = str(error)
    for rank, each in enumerate(gather_objects(refused, group, device)):
        if each:
            raise OffloadError(f"rank {rank}: {each}", kind="cannot_offload_on_rank", rank=rank)


def prepare_for_file(offload: Offload | None, budget: Budget, sequence: Sequence) -> None:
    """Reserve room for the offloads of a plan from a file.

    Raises ValueError if no tier was given, OffloadError if it is full. Warns if the plan offloads nothing although a
    tier was given.
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
    """Warn if several forwards are in flight: their plan offloads nothing."""
    if budget.link is not None and budget.forwards > 1:
        _log.warning(
            "%d forwards are in flight at once, and plans for several forwards move nothing to another tier: what has "
            "no room is computed again. Go backward after each forward to have offload= count.",
            budget.forwards,
            extra=record_fields("moves_nothing", forwards=budget.forwards),
        )
