"""Find partitions of a joint graph that need less memory but more time: with rotor_solver, and by minimum cuts."""

from __future__ import annotations

import operator
from collections import Counter, abc, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import combinations, pairwise, takewhile

from torch import fx

from rotor_profiling.torch_compat import partitioners
from rotor_py.compile.joint_graph import JointGraph, is_number, saved_by_torch
from rotor_py.compile.operator_costs import Cost
from rotor_py.compile.partition import BackwardWriter, GraphCosts, Partition, Weight, partition_keeping, weigh
from rotor_solver import Chain, Option, Sequence, Stage, frontier
from rotor_solver.max_flow import Network, reached
from rotor_solver.sequence import ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation

# Largest number of stages, roughly, into which a forward is cut. A guess: more make solving slower for little gain.
_MOST_STAGES = 64
# Number of cuts at which a small value, such as a mask, must be live to be kept in all partitions.
_SPREAD = 4
# Upper bound of the bytes of such a value, as a share of the bytes of all values. A guess: larger ones cost memory.
_SMALL = 0.01
_THRESHOLDS = 6  # number of limits tried for the seconds to recompute a byte. A guess: more make solving slower


class Stages:
    """A joint graph as a chain of stages, for the solver.

    A value is a node of the forward that allocates memory. The forward is cut where the live values have few bytes. The
    nodes between two cuts form a stage, whose input is the values live at the first cut. An option of a stage is a set
    of values to keep for its backward: either all that the backward reads, or those of fewest bytes from which allowed
    operators recompute the others (a minimum cut, as in `capture/graph/selective_recompute.py`).
    """

    def __init__(self, joint: JointGraph, costs: dict[fx.Node, Cost]) -> None:
        self.joint, self.costs = joint, costs
        forward, root = joint.forward, joint.root
        # Nodes of the forward that allocate memory, in graph order. A tuple is represented by its `getitem` nodes.
        tuples = {node.all_input_nodes[0] for node in forward if node.target is operator.getitem}
        inside = (node for node in forward if root[node] is node and not is_number(node))
        self.values = {node: None for node in inside if joint.bytes_of(node) and node not in tuples}
        read = [each for node in joint.backward for each in node.all_input_nodes]
        self.read_backward = {root[each] for each in (*read, *joint.gradients) if each in root} & self.values.keys()
        # Maps each node of the forward to the values that it reads, directly or through nodes such as views.
        self.reads: dict[fx.Node, set[fx.Node]] = {}
        made = {node: position for position, node in enumerate(forward)}
        last = dict(made)  # position of the last node that reads a value
        for position, node in enumerate(forward):
            self.reads[node] = set()
            for each in node.all_input_nodes:
                self.reads[node] |= {each} if each in self.values else self.reads.get(each, set())
            last |= dict.fromkeys(self.reads[node], position)
        starts = self._cut_forward(last)
        self.members = [forward[a:b] for a, b in pairwise([*starts, len(forward)])]
        self.stage_of = {node: number for number, members in enumerate(self.members) for node in members}
        live = [[value for value in self.values if made[value] < start <= last[value]] for start in starts]
        # Values that all partitions keep: outputs, which the caller holds, and small values live at many cuts.
        small = _SMALL * self.bytes_of(self.values)
        times = Counter(value for values in live for value in values)
        often = {value for value, count in times.items() if count >= _SPREAD and joint.bytes_of(value) <= small}
        self.shared = ({root[node] for node in joint.outputs if node in root} | often) & self.values.keys()
        # For each stage, the values live at its start that are not `shared`. Then an empty list, for the loss.
        self.inputs = [*([value for value in values if value not in self.shared] for values in live), []]
        own = self.values.keys() - self.shared
        self.inside = [[node for node in members if node in own] for members in self.members]
        owned = [value for values in self.inside for value in values]
        targets = self.read_backward - self.shared
        found = {frozenset(self._cut(owned, targets, again)): again for again in self._allowed()}
        # Pairs for the levels above 0: values that may be recomputed, and values to keep, the most bytes first.
        self._levels = [(again, kept) for kept, again in found.items()]
        self._levels.sort(key=lambda pair: -self.bytes_of(pair[1]))
        # For each level of recomputation, the values that stages keep; at level 0, all that the backward reads.
        self.parts: list[Set[fx.Node]] = [
            kept | self.shared for kept in (self.read_backward, *(kept for _, kept in self._levels))
        ]
        # For each stage, its options: pairs of a level of recomputation (an index of `parts`) and the kept values.
        self.options = [self._options(number) for number in range(len(self.members))]

    def _cut_forward(self, last_read: dict[fx.Node, int]) -> list[int]:
        """Return the index in `joint.forward` of each stage's first node."""
        joint, ending = self.joint, Counter[int]()
        for value in self.values:
            ending[last_read[value]] += joint.bytes_of(value)
        live, made, lives, mades = 0, 0, [0], [0]
        for position, node in enumerate(joint.forward):
            size = joint.bytes_of(node) if node in self.values else 0
            live, made = live + size - ending[position], made + size
            lives.append(live)
            mades.append(made)
        apart = max(1, made // _MOST_STAGES)
        found, last = [0], 0
        for position in range(1, len(joint.forward)):
            if joint.forward[position].target is operator.getitem or mades[position] - last < apart:
                continue
            # Cut here if no position at most `apart` allocated bytes before or after this one has fewer live bytes.
            near = takewhile(lambda p: mades[p] - mades[position] <= apart, range(position + 1, len(lives)))  # noqa: B023
            behind = (p for p in range(position - 1, found[-1], -1) if mades[position] - mades[p] <= apart)
            if all(lives[position] <= lives[each] for each in (*near, *behind)):
                found.append(position)
                last = mades[position]
        return found

    def _options(self, number: int) -> list[tuple[int, frozenset[fx.Node]]]:
        inside = self.inside[number]
        targets = self.read_backward.intersection(inside)
        found = {frozenset(targets): 0}
        for level, (again, everywhere) in enumerate(self._levels, 1):
            local = self._cut(inside, targets, again)
            # Also keep inputs that the recomputation reads. (Those that a backward reads are other stages' targets.)
            local |= set(self.inputs[number]) & self.needed(number, local) - self.read_backward
            for option in (frozenset(local), everywhere & set(inside)):
                if self.bytes_of(option) < self.bytes_of(targets):
                    found.setdefault(option, level)
        return [(level, kept) for kept, level in found.items()]

    def _allowed(self) -> list[Set[fx.Node]]:
        """Return the sets of values that levels of recomputation may recompute, one set for each level."""
        joint = self.joint
        # For an element of a tuple, take the seconds and bytes of the node that returns the tuple.
        sources = {each: each.all_input_nodes[0] if each.target is operator.getitem else each for each in self.values}
        rates = {
            value: self.costs[sources[value]].seconds / max(1, joint.bytes_of(sources[value]))
            for value in self.values
            if value in joint.replayable
        }
        if not rates:
            return []
        ordered = sorted(set(rates.values()))
        limits = sorted({ordered[(len(ordered) - 1) * step // _THRESHOLDS] for step in range(1, _THRESHOLDS + 1)})
        found: list[Set[fx.Node]] = [{value for value, rate in rates.items() if rate <= limit} for limit in limits]
        kinds = partitioners.get_default_op_list()
        fused = {value for value in rates if not kinds.is_compute_intensive(sources[value])}
        # For each of two budgets of PyTorch's partitioner, add a set: all values but those that the partitioner keeps.
        kept = ({joint.root.get(node) for node in saved} for saved in saved_by_torch(joint))
        return [*found, fused, *(set(rates) - each for each in kept)]

    def _cut(self, inside: list[fx.Node], targets: Set[fx.Node], again: Set[fx.Node]) -> set[fx.Node]:
        """Return which values of `inside` to keep, of fewest bytes, so that recomputing `again` gives all `targets`."""
        flow = Network("made", "read")
        mine = set(inside)
        for value in inside:
            flow.add_edge((value, "made"), (value, "kept"), self.joint.bytes_of(value))
            if value in targets:
                flow.add_edge((value, "kept"), "read")
            if value not in again:
                flow.add_edge("made", (value, "made"))
            for each in self.reads[value] & mine:
                flow.add_edge((each, "kept"), (value, "made"))
        behind = flow.behind_least_cut()
        return {value for value in inside if (value, "kept") in behind and (value, "made") not in behind}

    def needed(self, number: int, kept: Set[fx.Node]) -> set[fx.Node]:
        """Return all nodes that a stage's recomputation and backward read if the stage keeps the values `kept`."""
        again = set(self.members[number]) - kept - self.shared

        def read(node: fx.Node) -> Iterable[fx.Node]:
            inputs = node.all_input_nodes if node in again else []
            return (*inputs, *(self.joint.root.get(each, each) for each in inputs))

        return set(reached(self.read_backward.intersection(self.inside[number]), read))

    def bytes_of(self, values: Iterable[fx.Node]) -> int:
        return sum(map(self.joint.bytes_of, values))


def chains(stages: Stages) -> dict[bool, Chain]:
    """Return two chains with approximate costs. Under the key True, each option also keeps its stage's output."""
    joint, costs, bytes_of = stages.joint, stages.costs, stages.bytes_of
    outputs = [{value for value in live if stages.stage_of[value] == n} for n, live in enumerate(stages.inputs[1:])]
    backward, returned = _backward(stages), set(joint.gradients)
    gradients = [bytes_of(returned.intersection(nodes)) for nodes in backward]
    temps = _backward_temps(stages, backward, [*map(bytes_of, outputs)], gradients)

    def seconds(nodes: Iterable[fx.Node]) -> float:
        return sum(costs[node].seconds for node in nodes)

    def stage(number: int, members: list[fx.Node], always: set[fx.Node]) -> Stage:
        forward, scratch = seconds(members), max((costs[node].scratch for node in members), default=0)
        options = []
        for level, kept in stages.options[number]:
            again = stages.needed(number, kept) & (set(members) - kept - stages.shared)
            run = forward + sum(costs[node].keeping for node in kept)
            back = seconds(backward[number]) + seconds(again)
            options.append(Option(run, back, bytes_of(kept | always), scratch, temps[level][number]))
        temp = scratch + max(map(joint.bytes_of, stages.inside[number]), default=0)
        return Stage(bytes_of(outputs[number]), tuple(options), forward, temp, gradient=gradients[number])

    return {
        keep: Chain(tuple(stage(n, each, outputs[n] if keep else set()) for n, each in enumerate(stages.members)), 0)
        for keep in (True, False)
    }


def _backward(stages: Stages) -> list[list[fx.Node]]:
    """Return a list of the backward's nodes for each stage: the last stage that a node, or a later node, reads from."""
    root, latest = stages.joint.root, 0
    found: list[list[fx.Node]] = [[] for _ in stages.members]
    for node in reversed(stages.joint.backward):
        roots = (root[each] for each in node.all_input_nodes if each in root)
        latest = max([latest, *(stages.stage_of[each] for each in roots if each in stages.stage_of)])
        found[latest].append(node)
    return [nodes[::-1] for nodes in found]


def _backward_temps(
    stages: Stages, backward: list[list[fx.Node]], outputs: list[int], gradients: list[int]
) -> list[list[int]]:
    """Return lists by level and stage: peak bytes of the stage's backward, without kept values and border gradients."""
    joint, stage_of = stages.joint, {node: number for number, nodes in enumerate(backward) for node in nodes}
    found = []
    for kept in stages.parts:
        partition = partition_keeping(joint, kept)
        curve = weigh(GraphCosts(joint, stages.costs), partition).curve
        most = [0] * len(stages.members)
        number = 0
        for run, live in zip(reversed(partition.backward), reversed(curve), strict=True):
            number = stage_of.get(run.node, number)  # a recomputed node counts for the stage of the run after it
            most[number] = max(most[number], live)
        held = stages.bytes_of({*joint.primals, *joint.tangents, *stages.shared}) + sum(gradients)
        temps = []
        for number, inside in enumerate(stages.inside):
            held += stages.bytes_of(kept & set(inside)) - gradients[number]
            incoming = outputs[number - 1] if number else 0
            temps.append(max(-incoming, most[number] - held - outputs[number] - incoming))
        found.append(temps)
    return found


def follow(stages: Stages, sequence: Sequence, *, keep_outputs: bool) -> Partition:
    """Return the partition that keeps what the memory-persistent `sequence` keeps, and recomputes others when read."""
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
    for node in stages.joint.backward:
        for each in node.all_input_nodes:
            value = stages.joint.root.get(each, each)
            if value in stages.values and value not in kept and value not in writer.available:
                _run_until(stages, writer, ahead, stages.stage_of[value])
        writer.write(node)
    return writer.partition()


def _run_until(stages: Stages, writer: BackwardWriter, ahead: deque[Operation], stage: int) -> None:
    """Write the operations `ahead` in the sequence, up to ForwardEnable of `stage`, as runs of the backward."""
    if not any(isinstance(operation, ForwardEnable) and operation.stage == stage for operation in ahead):
        return  # the stage has run again before: `writer` recomputes values that it did not keep when they are read
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


# The candidates do not depend on the budget, so that a smaller budget does not lead to a partition of larger peak.


# Number of units into which the solver divides memory. A guess: with too few, good candidates are missed.
_SLOTS = 300
_WORK = 300_000  # approximate number of nodes in all simulated partitions together. A guess: this takes some seconds
# Budgets tried for PyTorch's partitioner: shares of the bytes that it saves by default. A guess: each takes a second.
_TORCH_BUDGETS = (0.8, 0.6, 0.4, 0.3, 0.2, 0.1)
# Inductor's code is slower by this factor for our partitions than for PyTorch's of the same predicted time. Measured
# on a ConvNeXt, for three of our partitions and three of PyTorch's: 1.02 to 1.06.
_SLOWDOWN = 1.04
_FEWEST = 32  # number of partitions to try from each source, even for large graphs. A guess: fewer miss good ones


@dataclass(frozen=True, slots=True)
class Candidate:
    partition: Partition
    weight: Weight


def candidates(joint: JointGraph, costs: GraphCosts, usual: Candidate | None = None) -> list[Candidate]:
    """Return partitions by increasing peak, each faster than those before. `usual`: PyTorch's, if Inductor compiles."""
    stages = Stages(joint, costs.operators)
    most = max(_FEWEST, _WORK // (3 * (len(joint.forward) + len(joint.backward))))
    partitions = _mixed(stages, most)
    for keep_outputs, chain in chains(stages).items():
        found = frontier(chain, slots=_SLOTS).sequences
        partitions += [follow(stages, found[each], keep_outputs=keep_outputs) for each in _spread(len(found), most)]
    weighed = [Candidate(partition, weigh(costs, partition)) for partition in partitions]
    if usual is not None:
        weighed = [Candidate(each.partition, each.weight.taking_longer(_SLOWDOWN)) for each in weighed]
        weighed += [*by_torch(joint, costs, _TORCH_BUDGETS), usual]
    kept: list[Candidate] = []
    for each in sorted(weighed, key=lambda each: (each.weight.peak, each.weight.seconds)):
        if not kept or each.weight.seconds < kept[-1].weight.seconds:
            kept.append(each)
    return kept


def by_torch(joint: JointGraph, costs: GraphCosts, budgets: abc.Sequence[float]) -> list[Candidate]:
    """Return the choice of PyTorch's partitioner for each budget, a share of the bytes that it saves by default."""
    return [Candidate(each, weigh(costs, each)) for each in torch_partitions(joint, budgets)]


def torch_partitions(joint: JointGraph, budgets: abc.Sequence[float]) -> list[Partition]:
    """Return the partitions of `by_torch`, without costs. None of them recomputes random operators."""
    early = set(joint.early)
    kept = [[node for node in saved if node in joint.root or node in early] for saved in saved_by_torch(joint, budgets)]
    return [partition_keeping(joint, {joint.allocating(node) for node in each}) for each in kept]


def _mixed(stages: Stages, most: int) -> list[Partition]:
    """Return about `most` partitions whose first stages keep less than the others: their backward runs last."""
    parts = stages.parts
    pairs = list(combinations(parts, 2))
    cuts = _spread(len(stages.members) + 1, max(2, 1 + most // max(1, len(pairs))))[1:]
    mixtures = {frozenset(parts[0])}
    for more, less in pairs:
        for cut in cuts:
            early = {node for node in less if stages.stage_of[node] < cut}
            mixtures.add(frozenset(early | {node for node in more if stages.stage_of[node] >= cut}))
    ordered = sorted(mixtures, key=lambda each: sorted(map(stages.joint.order.__getitem__, each)))
    return [partition_keeping(stages.joint, kept) for kept in ordered]


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` integers of `range(count)`, about evenly spaced, with the first and the last one."""
    if count <= most:
        return list(range(count))
    return sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})
