"""How much memory whole parameters and their gradients need in a step of a model of `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rotor_py.distributed.shard_groups import ShardGroup, groups_of


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes of a group's parameters and gradients, on one process."""

    whole: int
    """The whole parameters, in the dtype in which they are gathered."""
    kept: int
    """This process's part after a forward, if parameters are then spread over fewer processes than between steps."""
    gradients: int
    """Whole gradients, as the backward makes them."""
    sent: int
    """Whole gradients as they are sent, and as they are kept if they are added up over steps."""

    @classmethod
    def of(cls, group: ShardGroup) -> GroupBytes:
        """The sizes of a group."""
        parameters = group.parameters
        trained = [each for each in parameters if each.sharded.requires_grad]
        whole = sum(each.size.numel() * each.dtype.itemsize for each in parameters)
        return cls(
            whole=whole,
            kept=whole // group.spread_after_forward if group.spread_after_forward else 0,
            gradients=sum(each.size.numel() * each.dtype.itemsize for each in trained),
            sent=sum(each.size.numel() * (group.reduce_dtype or each.dtype).itemsize for each in trained),
        )


def gathered_bytes(model: nn.Module) -> int:
    """An upper bound of what whole parameters and their gradients need at any moment of a step.

    It is no prediction: which groups are whole together depends on how fast processes communicate. What is received
    lies in one piece before it is copied into parameters, and so do gradients while they are sent.
    """
    groups = groups_of(model)
    sizes = {group: GroupBytes.of(group) for group in groups}
    throughout, passing, received, made = 0, [0, 0, 0], [0, 0], [0]  # zeros, so that there are always as many as below
    sent: dict[ShardGroup, int] = {}
    for group in groups:
        own = sizes[group]
        outer = [other for other in groups if other.contains(group)]
        # FSDP keeps the outermost group whole to the end of the step.
        first = outer[0] if outer else group
        inner = [each for each in (*outer, group) if each is not first]  # all of them are whole at once
        sent[first] = max(sent.get(first, 0), sum(sizes[each].sent for each in (*outer, group)))
        made.append(sum(sizes[each].gradients for each in inner))
        if group.keeps_gradients:
            throughout += own.sent
        if group is first:
            throughout += own.whole + own.gradients
        elif group.reshards:
            throughout += own.kept
            passing.append(sum(sizes[each].whole for each in inner))
        else:
            throughout += own.whole
            received.append(own.whole)
    # At the worst moment one group is in use, the next is prefetched, and one is gathered to run a stage again. The
    # largest counts twice: while it is gathered, it is there as it was received, and as parameters.
    one, two, three = sorted(passing)[:-4:-1]
    return throughout + max(2 * one + two + three, sum(sorted(received)[-2:])) + max(made) + sum(sent.values())
