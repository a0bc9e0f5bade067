"""Gathering sharded parameters around a stage that is run again in the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


@contextmanager
def gathered_to_read(groups: Iterable[ShardGroup]) -> Iterator[None]:
    """Have the whole parameters of these groups while a backward makes values again from them.

    The operator that asks for a value may belong to another group than those that make it. All processes come here in
    the same order.
    """
    missing = [group for group in groups if not group.is_whole]
    for group in missing:
        group.gather()
    try:
        yield
    finally:
        for group in missing:
            group.let_go()
