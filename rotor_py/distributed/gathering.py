"""Gathering sharded parameters around a stage that is run again in the backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rotor_py.distributed.shard_groups import ShardGroup, groups_of


@contextmanager
def gathered_again(function: Any) -> Iterator[None]:
    """Have the whole parameters of a stage while it is run again in the backward, and let go of them after that.

    PyTorch frees what a forward has gathered, but not what a forward gathers while a backward runs. Without this, the
    parameters of all stages that are run again one after the other would be there at once.
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


class GatheredToRead:
    """Sharded parameters that a backward makes values from: whole while they are needed, inside of this as a context.

    The operator that asks for a value may belong to another group than those that make it. All processes come here in
    the same order.
    """

    def __init__(self) -> None:
        self._here: list[ShardGroup] = []

    def __enter__(self) -> GatheredToRead:
        return self

    def __exit__(self, *error: object) -> None:
        self._let_go_of_all_but(())

    def need(self, groups: Collection[ShardGroup]) -> None:
        """Gather the parameters of these groups. Those of others are let go of: there may be no room for both."""
        self._let_go_of_all_but(groups)
        for group in groups:
            if not group.is_whole:
                group.gather()
                self._here.append(group)

    def _let_go_of_all_but(self, groups: Collection[ShardGroup]) -> None:
        for group in self._here:
            if group not in groups:
                group.let_go()
        self._here = [group for group in self._here if group in groups]
