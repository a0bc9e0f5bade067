"""Stages of which one first run shows what all first runs do.

Such a stage can be run again without having run before: what a first run would record is known. So what shows that it
makes the same numbers without a graph (`graph_effects`) also saves its first run when it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rotor_profiling.isolate import RandomState
from rotor_py.stage.restored.autocast import autocast_now
from rotor_py.stage.restored.decisions import remember_undecided
from rotor_py.stage.surroundings import Surroundings, own_buffers, recall_moving, remember_moving


class Steady(NamedTuple):
    """What every first run of a stage does that decides nothing and sets no attributes: whether it `draws` random
    numbers, the positions of buffers that are `moving`, and the most bytes that it holds beyond those before it.
    """

    draws: bool
    moving: frozenset[int]
    rise: int


_remembered: WeakKeyDictionary[nn.Module, Steady] = WeakKeyDictionary()


def shown_by(found: Surroundings, function: Callable[..., Any], rise: int) -> Steady | None:
    """What a first run of `function` shows, which took `rise` bytes at most; None if later runs take over more of it.

    `found` is what surrounded that run.
    """
    more = found.decisions or found.drawn or found.changes()
    return None if more else Steady(found.random is not None, recall_moving(function), rise)


def remember_steady(function: nn.Module, steady: Steady | None) -> None:
    """Have first runs of a stage do what one of a stage like it was seen to do; None if that tells nothing."""
    _remembered.pop(function, None)
    if steady is not None:
        _remembered[function] = steady
        remember_moving(function, steady.moving)
        remember_undecided(function)


def before_first(function: Callable[..., Any], devices: tuple[torch.device, ...]) -> tuple[Surroundings, int] | None:
    """What surrounds `function` now, as its first run would find it, and the most bytes that this would hold; None if
    only such a run tells.
    """
    known = _remembered.get(function) if isinstance(function, nn.Module) else None
    if known is None:
        return None
    slots = own_buffers(function)
    buffers = tuple((slots[i], slots[i][2].clone()) for i in sorted(known.moving))
    random = RandomState.now(devices) if known.draws else None
    return Surroundings(autocast_now(devices), random, buffers, slots=tuple(slots)), known.rise
