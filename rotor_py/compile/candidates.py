"""Candidate partitions of a joint graph, from the solver's sequences and from minimum cuts."""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass
from itertools import combinations

from rotor_py.compile.graph_chain import Stages, chains
from rotor_py.compile.joint_graph import JointGraph, usually_saved
from rotor_py.compile.partition import BackwardWriter, Partition, in_time
from rotor_py.compile.peak import GraphCosts, Weight
from rotor_solver import Sequence, frontier
from rotor_solver.sequence import ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation


def follow(stages: Stages, sequence: Sequence, *, keep_outputs: bool) -> Partition:
    """Return the partition of a memory-persistent sequence; stages are recomputed right before they are read."""
    operations = list(sequence)
    loss = operations.index(Loss())
    kept = set(stages.shared)
    for operation in operations[:loss]:
        if isinstance(operation, ForwardEnable):
            kept |= stages.options[operation.stage][operation.option][1]
            kept.update(stages.inputs[operation.stage + 1] if keep_outputs else ())
        elif isinstance(operation, ForwardCheck):
            kept.update(stages.inputs[operation.stage])
    writer = BackwardWriter(stages.joint, kept)
    ahead = deque(operations[loss + 1 :])
    root, values = stages.joint.root, set(stages.values)
    for node in stages.joint.backward:
        for each in node.all_input_nodes:
            value = root.get(each, each)
            if value in values and value not in kept and value not in writer.there:
                _run_until(stages, writer, ahead, stages.stage_of[value])
        writer.write(node)
    return writer.partition()


def _run_until(stages: Stages, writer: BackwardWriter, ahead: deque[Operation], stage: int) -> None:
    """Run the sequence's next operations, up to the run of `stage` that keeps what its backward reads."""
    if not any(isinstance(operation, ForwardEnable) and operation.stage == stage for operation in ahead):
        return  # it has run; readers recompute values that it did not keep
    while ahead:
        operation = ahead.popleft()
        if not isinstance(operation, ForwardEnable | ForwardCheck | ForwardNograd):
            continue
        number = operation.stage
        made = set(later := stages.inputs[number + 1])
        if isinstance(operation, ForwardEnable):
            made |= stages.options[number][operation.option][1]
        for value in sorted(made, key=stages.joint.order.__getitem__):
            writer.make(value)
        writer.forget(node for node in stages.members[number] if node not in made)
        if isinstance(operation, ForwardNograd):
            writer.forget(value for value in stages.inputs[number] if value not in later)
        if isinstance(operation, ForwardEnable) and number == stage:
            return


# The candidates do not depend on the budget. So a smaller budget never gives a larger peak: that partition would have
# been chosen before.


_SLOTS = 300
"""Slots of memory in the solver. A guess: too few miss candidates; results are weighed exactly in any case."""
_WORK = 300_000
"""Nodes weighed for all partitions together, about. A guess: it takes some seconds."""
_THEIRS = (0.8, 0.6, 0.4, 0.3, 0.2, 0.1)
"""Budgets of PyTorch's partitioner to try. A guess: each takes about a second, and those between hardly differ."""
_OURS_LONGER = 1.04
"""How much longer Inductor's code takes for our partitions than for PyTorch's with equally fast operators. Of a
ConvNeXt, three of each were timed: ours took 2 to 6 % more.
"""
_FEWEST = 32
"""Fewest partitions weighed of each kind, however large the graph is. A guess: fewer miss good ones."""


@dataclass(frozen=True, slots=True)
class Candidate:
    partition: Partition
    weight: Weight


def candidates(joint: JointGraph, costs: GraphCosts, usual: Candidate | None = None) -> list[Candidate]:
    """Return partitions that no other beats in memory and time, least memory first; fused if the `usual` is given."""
    stages = Stages(joint, costs.usual)
    most = max(_FEWEST, _WORK // (3 * (len(joint.forward) + len(joint.backward))))
    partitions = _mixed(stages, most)
    for keep_outputs, chain in chains(stages).items():
        found = frontier(chain, slots=_SLOTS).sequences
        partitions += [follow(stages, found[each], keep_outputs=keep_outputs) for each in _spread(len(found), most)]
    weighed = [Candidate(partition, costs.weigh(partition)) for partition in partitions]
    if usual is not None:
        weighed = [Candidate(each.partition, each.weight.taking_longer(_OURS_LONGER)) for each in weighed]
        weighed += [*by_torch(joint, costs, _THEIRS), usual]
    kept: list[Candidate] = []
    for each in sorted(weighed, key=lambda each: (each.weight.peak, each.weight.seconds)):
        if not kept or each.weight.seconds < kept[-1].weight.seconds:
            kept.append(each)
    return kept


def by_torch(joint: JointGraph, costs: GraphCosts, budgets: abc.Sequence[float]) -> list[Candidate]:
    """Return the partitions of PyTorch's partitioner for Inductor with its own budgets, shares of what 1 saves."""
    return [Candidate(each, costs.weigh(each)) for each in torch_partitions(joint, budgets)]


def torch_partitions(joint: JointGraph, budgets: abc.Sequence[float]) -> list[Partition]:
    """Return PyTorch's partitions without their costs. Random operators run once under any budget."""
    early = set(joint.early)
    kept = [[node for node in saved if node in joint.root or node in early] for saved in usually_saved(joint, budgets)]
    return [in_time(joint, {joint.allocating(node) for node in each}) for each in kept]


def _mixed(stages: Stages, most: int) -> list[Partition]:
    """Return about `most` partitions whose early stages, which come last in the backward, keep less than late ones."""
    parts = stages.parts
    pairs = list(combinations(parts, 2))
    cuts = _spread(len(stages.members) + 1, max(2, 1 + most // max(1, len(pairs))))[1:]
    mixtures = {frozenset(parts[0])}
    for more, less in pairs:
        for cut in cuts:
            early = {node for node in less if stages.stage_of[node] < cut}
            mixtures.add(frozenset(early | {node for node in more if stages.stage_of[node] >= cut}))
    ordered = sorted(mixtures, key=lambda each: sorted(map(stages.joint.order.__getitem__, each)))
    return [in_time(stages.joint, kept) for kept in ordered]


def _spread(count: int, most: int) -> list[int]:
    """Return up to `most` of `range(count)`, evenly, both ends included."""
    if count <= most:
        return list(range(count))
    return sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})
