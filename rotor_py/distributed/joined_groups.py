"""Groups of processes that overlap, joined to one: what trains together may be spread over several dimensions.

With tensor parallelism in one dimension of a mesh and data parallelism in another one, a process shares each group with
other processes. They all have to follow one plan: none of them may wait in a collective that another comes to later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

_joined: dict[tuple[str, ...], dist.ProcessGroup] = {}
"""The groups that were made here, by the names of those that they join."""


def joined(groups: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """The processes that these groups of this process connect, also by way of others; None without groups.

    Groups have to be those of the dimensions of a mesh, as far as they are different. The first call communicates, and
    all of the processes have to come to it together.
    """
    different = list({tuple(dist.get_process_group_ranks(group)): group for group in groups}.items())
    if len(different) <= 1:
        return different[0][1] if different else None
    key = tuple(group.group_name for _, group in different)
    if key not in _joined:
        _joined[key] = _join(different)
    return _joined[key]


def _join(groups: list[tuple[tuple[int, ...], dist.ProcessGroup]]) -> dist.ProcessGroup:
    known = {rank for ranks, _ in groups for rank in ranks}
    if len(known) < dist.get_world_size():
        # In one dimension after the other: afterwards each process knows all that it is connected with.
        for ranks, group in groups:
            told: list[set[int]] = [set()] * len(ranks)
            dist.all_gather_object(told, known, group=group)
            known = set().union(*told)
    if len(known) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    # Only its members: the other processes may train another part of a model, and never come here.
    made = dist.new_group(sorted(known), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
