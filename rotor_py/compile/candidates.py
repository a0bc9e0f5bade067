"""Candidate partitions of a joint graph, from the solver's sequences and from minimum cuts."""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass, replace
from itertools import combinations

from torch import fx

from rotor_py.compile.graph_chain import Stages
from rotor_py.compile.joint_graph import JointGraph, usually_saved
from rotor_py.compile.peak import GraphCosts, Weight
from rotor_py.compile.program import BackwardWriter, Program, in_time
from rotor_solver import Sequence, frontier
from rotor_solver.sequence import ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation


def follow(stages: Stages, sequence: Sequence, *, keep_outputs: bool) -> Program:
    """Return the program of a memory-persistent sequence, found for a chain with the same `keep_outputs`.

    A stage that the sequence recomputes runs right before the first operator that reads one of its values.
    """
    operations = list(sequence)
    loss = operations.index(Loss())
    kept = set(stages.shared)
    for operation in operations[:loss]:
        match operation:
            case ForwardEnable(stage, option):
                kept |= stages.kept[stage][option]
                if keep_outputs:
                    kept.update(stages.inputs[stage + 1])
            case ForwardCheck(stage):
                kept.update(stages.inputs[stage])
            case _:
                pass
    writer = BackwardWriter(stages.joint, kept)
    ahead = deque(operations[loss + 1 :])
    root, values = stages.joint.root, set(stages.values)
    for node in stages.joint.backward:
        for each in node.all_input_nodes:
            value = root.get(each)
            if value in values and value not in kept and value not in writer.there:
                assert value is not None
                _run_until(stages, writer, ahead, stages.stage_of[value])
        writer.write(node)
    return writer.program()


def _run_until(stages: Stages, writer: BackwardWriter, ahead: deque[Operation], stage: int) -> None:
    """Run the sequence's next operations, up to the run of `stage` that keeps what its backward reads."""
    if not any(isinstance(operation, ForwardEnable) and operation.stage == stage for operation in ahead):
        return  # it has run; readers recompute values that it did not keep
    while ahead:
        operation = ahead.popleft()
        match operation:
            case ForwardEnable(number, option):
                _make(stages, writer, number, stages.kept[number][option])
                if number == stage:
                    return
            case ForwardCheck(number):
                _make(stages, writer, number, frozenset())
            case ForwardNograd(number):
                _make(stages, writer, number, frozenset())
                later = set(stages.inputs[number + 1])
                writer.forget(value for value in stages.inputs[number] if value not in later)
            case _:
                pass


def _make(stages: Stages, writer: BackwardWriter, number: int, kept: frozenset[fx.Node]) -> None:
    """Compute a stage's output and `kept`, and forget its other values."""
    wanted = {*kept, *(value for value in stages.inputs[number + 1])}
    for value in sorted(wanted, key=stages.joint.order.__getitem__):
        writer.make(value)
    writer.forget(node for node in stages.members[number] if node not in wanted)


# Choose a program: of many between storing everything and storing as little as possible, the fastest that fits.
#
# The candidates do not depend on the budget. So a smaller budget never gives a larger peak: that program would have
# been chosen before.


_SLOTS = 300
"""Slots of memory in the solver. A guess: too few miss candidates; results are weighed exactly in any case."""
_WORK = 300_000
"""Nodes weighed for all programs together, about. A guess: it takes some seconds."""
_THEIRS = (0.8, 0.6, 0.4, 0.3, 0.2, 0.1)
"""Budgets of PyTorch's partitioner to try. A guess: each takes about a second, and those between hardly differ."""
_OURS_LONGER = 1.04
"""How much longer Inductor's code takes for our programs than for PyTorch's with equally fast operators. Of a ConvNeXt,
three of each were timed: ours took 2 to 6 % more.
"""
_CLOSE = 0.03
"""How much longer a program may take by its graph than one of the other maker and still be the faster one: about the
spread around `_OURS_LONGER`.
"""
_FEWEST = 32
"""Fewest programs weighed of each kind, however large the graph is. A guess: fewer miss good ones."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A program and its costs."""

    program: Program
    weight: Weight
    by_torch: bool = False
    """Whether PyTorch's partitioner made it."""


def candidates(joint: JointGraph, costs: GraphCosts, *, fused: bool = False) -> list[Candidate]:
    """Return programs that no other of the same maker beats in both memory and time, least memory first.

    Operators run one by one, or `fused` by Inductor; the latter includes PyTorch's own partitions for its budgets.
    """
    stages = Stages(joint, costs.usual)
    most = max(_FEWEST, _WORK // (3 * (len(joint.forward) + len(joint.backward))))
    programs = _mixed(stages, most)
    for keep_outputs in (True, False):
        found = frontier(stages.chain(keep_outputs=keep_outputs), slots=_SLOTS).sequences
        programs += [follow(stages, found[each], keep_outputs=keep_outputs) for each in _spread(len(found), most)]
    ours = [Candidate(program, costs.weigh(program)) for program in programs]
    if not fused:
        return undominated(ours)
    both = [*undominated([*map(_as_compiled, ours)]), *undominated(_weighed(joint, costs, _THEIRS))]
    return sorted(both, key=lambda each: each.weight.peak)


def _as_compiled(ours: Candidate) -> Candidate:
    weight = ours.weight
    seconds, replayed = _OURS_LONGER * weight.seconds, _OURS_LONGER * weight.replayed_seconds
    return replace(ours, weight=replace(weight, seconds=seconds, replayed_seconds=replayed))


def undominated(found: list[Candidate]) -> list[Candidate]:
    """Drop those that another beats or equals in both memory and time; least memory first."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda each: (each.weight.peak, each.weight.seconds)):
        if not kept or each.weight.seconds < kept[-1].weight.seconds:
            kept.append(each)
    return kept


def fastest_within(found: list[Candidate], limit: int) -> Candidate | None:
    """Return the fastest of `candidates` within `limit` bytes."""
    return next((each for each in reversed(found) if each.weight.peak <= limit), None)


def rival_within(found: list[Candidate], limit: int, best: Candidate) -> Candidate | None:
    """Return the fastest of the other maker within `limit` bytes, if it may be faster than the `best` of `found`."""
    other = fastest_within(undominated([each for each in found if each.by_torch != best.by_torch]), limit)
    if other is None or other.program.does_as(best.program):
        return None
    return other if other.weight.seconds <= (1 + _CLOSE) * best.weight.seconds else None


def usual(joint: JointGraph, costs: GraphCosts) -> Candidate:
    """Return the partition of PyTorch's partitioner for Inductor without a budget: none is known to be faster."""
    (found,) = _weighed(joint, costs, [1])
    return found


def by_budgets(joint: JointGraph, budgets: abc.Sequence[float]) -> list[Candidate]:
    """Return the partitions of PyTorch's partitioner for Inductor with its own budgets, shares of what 1 saves."""
    return _weighed(joint, GraphCosts.of(joint, fused=True), budgets)


def _weighed(joint: JointGraph, costs: GraphCosts, budgets: abc.Sequence[float]) -> list[Candidate]:
    return [Candidate(each, costs.weigh(each), by_torch=True) for each in programs_by_budgets(joint, budgets)]


def programs_by_budgets(joint: JointGraph, budgets: abc.Sequence[float]) -> list[Program]:
    """Return PyTorch's partitions without their costs. Random operators run once under any budget."""
    early = set(joint.early)
    kept = [[node for node in saved if node in joint.root or node in early] for saved in usually_saved(joint, budgets)]
    return [in_time(joint, {joint.allocating(node) for node in each}) for each in kept]


def _mixed(stages: Stages, most: int) -> list[Program]:
    """Return about `most` programs without a sequence, whose early stages keep less for the backward than late ones.

    Early stages come last in the backward, when little else is in memory, so their values are dropped first.
    """
    parts = [stages.part(level) for level in range(stages.levels)]
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
