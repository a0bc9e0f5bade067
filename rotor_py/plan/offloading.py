"""What plans that move activations to another tier do not go together with, and what they need of that tier."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch

from rotor_py.errors import UnsupportedModelError
from rotor_py.measure.budget import Budget
from rotor_py.offload.offload import Offload, checked_name
from rotor_solver import Sequence
from rotor_solver.moving import Link

_log = logging.getLogger("rotor_py")


class Asked(Protocol):
    """The settings that are looked at."""

    offload: str | None
    by_hand: Any
    forwards_in_flight: int
    on_oom: str
    compile: Any


class TrainedAlone(Protocol):
    """A model, and who trains it."""

    core: torch.nn.Module

    @property
    def alone(self) -> bool: ...

    @property
    def sharded(self) -> bool: ...


def refuse_settings(asked: Asked) -> None:
    """ValueError where `offload` is no tier that there is here, or excludes what else is asked for."""
    if asked.offload is None:
        return
    asked.offload = checked_name(asked.offload)
    others = {
        f"{asked.by_hand} leaves nothing to choose": asked.by_hand is not None,
        f"forwards_in_flight={asked.forwards_in_flight} has several forwards share the way": asked.forwards_in_flight
        > 1,
        "on_oom='replan' runs stages again that have moved what they saved": asked.on_oom == "replan",
        "compile= has Inductor decide what a stage saves": bool(asked.compile),
    }
    for reason, given in others.items():
        if given:
            raise ValueError(f"offload= has a plan move what stages save, and {reason}; leave one of them out")


def refuse_several_processes(model: TrainedAlone) -> None:
    """UnsupportedModelError for a model that is trained by several processes, or is sharded."""
    if not model.alone or model.sharded or any(hasattr(each, "device_mesh") for each in model.core.parameters()):
        raise UnsupportedModelError(
            f"offload= is for one process, and {type(model.core).__name__} is trained by several or sharded: their "
            "plans would differ by what each of them measures of its own disk; leave offload= out"
        )


def link_to(offload: Offload, device: torch.device) -> Link:
    """How fast memory of `device` goes to the tier and back. UnsupportedModelError if it cannot go there."""
    kind = "cuda" if offload.name == "host" else "cpu"
    if device.type != kind:
        other = "file:/path" if kind == "cuda" else "host"
        raise UnsupportedModelError(
            f"offload={offload.name!r} moves memory of {kind} devices, and the model is on {device}; use "
            f"offload={other!r}"
        )
    return offload.link(device)


def reserve(offload: Offload, budget: Budget, sequence: Sequence) -> None:
    """Have room in the tier for all that a step by `sequence` moves. OffloadError if there is less."""
    if nbytes := budget.moved_bytes(sequence):
        offload.tier.reserve(nbytes)


def prepare_for_file(offload: Offload | None, budget: Budget, sequence: Sequence) -> None:
    """Have room for what a plan from a file moves. ValueError where nobody has said where to, OffloadError if full.

    A warning says so where the plan moves nothing, although it might.
    """
    if sequence.moves is None:
        if offload is not None:
            _log.warning("the plan from the file moves nothing, so offload=%r has nothing to do", offload.name)
        return
    if offload is None:
        raise ValueError(
            f"the plan moves activations (it was made with offload={budget.link_name!r}); give offload= here as well, "
            "for where they go"
        )
    reserve(offload, budget, sequence)


def refuse_compiled(offload: Offload | None) -> None:
    """ValueError where stages are to be compiled, and plans may move what they save."""
    if offload is not None:
        raise ValueError(
            "offload= has a plan move what stages save, and torch.compile has Inductor decide what that is; leave "
            "one of them out"
        )


def tell_of_several_forwards(budget: Budget) -> None:
    """A warning if forwards were noticed that are in flight at once: their plan moves nothing."""
    if budget.link is not None and budget.forwards > 1:
        _log.warning(
            "%d forwards are in flight at once, and plans for several forwards move nothing to another tier: what has "
            "no room is computed again. Go backward after each forward to have offload= count.",
            budget.forwards,
        )
