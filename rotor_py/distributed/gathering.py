"""Gathering sharded parameters around a stage that is run again in the backward."""

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
    for group in [*hooked, *_begun_before(function)]:
        group.gather()
    try:
        yield
    finally:
        for group in hooked:
            group.let_go()


def _begun_before(function: nn.Module) -> list[ShardGroup]:
    """The groups whose modules have begun before a stage of a captured graph. Where they end, it lets go of them."""
    found = [group for module in function.modules() for group in getattr(module, "begun", ())]
    return [group for group in dict.fromkeys(found) if isinstance(group, ShardGroup)]
