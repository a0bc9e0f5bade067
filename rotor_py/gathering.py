"""Sharded parameters in memory: whole while a stage is run again, and how many bytes that is at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rotor_py.shard_groups import ShardGroup, groups_of
from rotor_py.sharded import groups_used


class Gathering:
    """Gathers parameters for stages that are run again in the backward, before the backward of their group begins.

    PyTorch lets go of what a forward has gathered, but not while a backward runs: parameters of all stages that are run
    again one after the other would be there at once.
    """

    def __init__(self) -> None:
        self._ours: dict[ShardGroup, None] = {}

    @contextmanager
    def whole(self, function: Any, following: Any) -> Iterator[None]:
        """Gather what a stage uses, and let go of it after the run, but for what the stage `following` it uses."""
        for group in groups_used(function):
            if not group.is_whole:
                if group.reshards and not group.is_coming:
                    self._ours[group] = None
                group.gather()
        kept: list[ShardGroup] = []
        try:
            yield
            kept = groups_used(following)
        finally:
            for group in [each for each in self._ours if each not in kept]:
                del self._ours[group]
                if not group.goes_backward:
                    group.let_go()


def gathered_bytes(model: nn.Module) -> int:
    """What whole parameters and their gradients need at most at any moment of a step: an estimate, from above.

    What is received lies in one piece before it is copied into parameters, and gradients likewise while they are sent.
    """
    throughout, passing, received, made, sent = 0, [0, 0, 0], [0, 0], [0], [0]
    for group in groups_of(model):
        size = sum(each.whole_bytes for each in group.parameters)
        gradients = sum(each.gradient_bytes(None) for each in group.parameters)
        sent.append(sum(each.gradient_bytes(group.reduce_dtype) for each in group.parameters))
        if group.keeps_gradients:
            throughout += sent[-1]
        if model in group.modules:  # it is let go, and its gradients sent, at the end of the step
            throughout += size + gradients
        elif group.reshards:
            passing.append(size)
            made.append(gradients)
        else:
            throughout += size
            received.append(size)
            made.append(gradients)
    # One group is used; the next is received already; one is gathered, in two copies, to run a stage again.
    first, second, third = sorted(passing, reverse=True)[:3]
    gathered = max(2 * first + second + third, sum(sorted(received)[-2:]))
    return throughout + gathered + max(made) + max(sent)
