"""Sharded parameters in memory: whole while a stage is run again, and how many bytes that is at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rotor_py.distributed.shard_groups import ShardGroup, groups_of


@contextmanager
def gathered_again(function: Any) -> Iterator[None]:
    """Have the parameters of a stage whole that is run again in the backward, before that of its group begins.

    PyTorch lets go of what a forward has gathered, but not of what it gathers while a backward runs: the parameters of
    all stages that are run again one after the other would be there at once.
    """
    if not isinstance(function, nn.Module):
        yield
        return
    hooked = groups_of(function)
    for group in hooked:
        group.gather()
    try:
        yield
    finally:
        for group in hooked:
            group.let_go()


def gathered_bytes(model: nn.Module) -> int:
    """What whole parameters and their gradients need at most at any moment of a step: an estimate, from above.

    What is received lies in one piece before it is copied into parameters, and gradients likewise while they are sent.
    """
    groups = groups_of(model)
    throughout, passing, received, made = 0, [0, 0, 0], [0, 0], [0]
    sent: dict[ShardGroup, int] = {}
    for group in groups:
        outer = [other for other in groups if other.contains(group)]
        first = outer[0] if outer else group  # it is let go at the end of the step
        inner = [each for each in (*outer, group) if each is not first]  # all of them are there at once
        sent[first] = max(sent.get(first, 0), sum(each.sent_bytes for each in (*outer, group)))
        made.append(sum(each.gradient_bytes for each in inner))
        if group.keeps_gradients:
            throughout += group.sent_bytes
        if group is first:
            throughout += group.whole_bytes + group.gradient_bytes
        elif group.reshards:
            throughout += group.kept_bytes
            passing.append(sum(each.whole_bytes for each in inner))
        else:
            throughout += group.whole_bytes
            received.append(group.whole_bytes)
    # One group is used; the next is received already; one is gathered, in two copies, to run a stage again.
    one, two, three = sorted(passing)[:-4:-1]
    return throughout + max(2 * one + two + three, sum(sorted(received)[-2:])) + max(made) + sum(sent.values())
