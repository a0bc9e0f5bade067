"""Split a joint graph into a forward graph and a backward graph, and simulate the memory of a step that runs both."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import (
    OrderedSet,
    graph_compile,
    is_bwd_seed_offset,
    is_primal,
    partitioners,
    raise_getitems,
)
from rotor_py.compile.joint_graph import JointGraph, ancestors, is_number
from rotor_py.compile.operator_costs import Cost, fused_costs, operator_costs, reduces
from rotor_solver.max_flow import reached


@dataclass(eq=False, slots=True)
class Run:
    """One run of a node. `reads` maps each node that it reads to the run in this graph that made it, else to itself."""

    node: fx.Node
    reads: dict[fx.Node, Run | fx.Node]


@dataclass(frozen=True, slots=True)
class Partition:
    """Nodes of the `forward`, nodes whose values are `saved` (some are graph inputs), and runs of the `backward`."""

    forward: tuple[fx.Node, ...]
    saved: frozenset[fx.Node]
    backward: tuple[Run, ...]


@dataclass
class BackwardWriter:
    """Writes the backward as a list of runs. A value that is not `kept` is recomputed right before its first reader."""

    joint: JointGraph
    kept: set[fx.Node]  # nodes whose values the forward keeps; all of them allocate memory, some are `JointGraph.early`
    runs: list[Run] = field(default_factory=list)
    # Maps nodes whose values exist at this point of the backward to the runs that made them. Has no nodes of `kept`.
    available: dict[fx.Node, Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forward = set(self.joint.forward)
        self.siblings: dict[fx.Node, list[fx.Node]] = {}
        for node in (*self.joint.forward, *self.joint.backward):
            if node.target is operator.getitem and not is_number(node):
                self.siblings.setdefault(node.all_input_nodes[0], []).append(node)

    def write(self, node: fx.Node) -> None:
        if node in self.available or node in self.kept:  # an element of an unpacked tuple, or kept by the forward
            return
        for each in node.all_input_nodes:
            self.make(each)
        self._run(node)

    def make(self, node: fx.Node) -> None:
        needed = reached(filter(self._missing, [node]), lambda each: filter(self._missing, each.all_input_nodes))
        for each in sorted(needed, key=self.joint.order.__getitem__):
            if each not in self.available:
                self._run(each)

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.available.pop(node, None)

    def partition(self) -> Partition:
        """Return the partition, without the runs whose values are not read."""
        joint = self.joint
        needed = {run for node in joint.gradients if (run := self.available.get(node)) is not None}
        needed.update(run for run in self.runs if run.node not in self.forward and not run.node.users)
        backward = []
        for run in reversed(self.runs):
            if run in needed or (run.node not in self.forward and run.node.is_impure()):
                backward.append(run)
                needed.update(each for each in run.reads.values() if isinstance(each, Run))
        tangents = set(joint.tangents)
        saved = {each for run in backward for each in run.reads.values() if isinstance(each, fx.Node)}
        saved |= {node for node in joint.gradients if node not in self.available and node not in tangents}
        saved -= tangents
        needed_forward = ancestors([*joint.outputs, *saved])
        forward = joint.in_run_order(node for node in (*joint.forward, *joint.early) if node in needed_forward)
        return Partition(tuple(forward), frozenset(saved), tuple(reversed(backward)))

    def _missing(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node in self.kept or node in self.available:
            return False
        return node not in self.forward or (node in self.joint.replayable and not is_number(node))

    def _run(self, node: fx.Node) -> None:
        run = Run(node, {each: self.available.get(each, each) for each in node.all_input_nodes})
        self.runs.append(run)
        self.available[node] = run
        # Unpack a tuple at once, since it would keep elements alive that no later run reads.
        for each in self.siblings.get(node, ()):
            if each not in self.kept:
                self.available[each] = Run(each, {node: run})
                self.runs.append(self.available[each])
        if node in self.siblings:
            del self.available[node]  # forget the tuple, but not its elements


def partition_keeping(joint: JointGraph, kept: Iterable[fx.Node]) -> Partition:
    """Return the partition that keeps `kept`, and recomputes each other value at most once: when it is first read."""
    writer = BackwardWriter(joint, set(kept))
    for node in joint.backward:
        writer.write(node)
    return writer.partition()


def extract(
    joint: JointGraph, partition: Partition, static_inputs: list[int] | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graphs of the forward and of the backward, with their nodes in the order of `partition`."""
    graph = fx.Graph()
    copies: dict[fx.Node | Run, fx.Node] = {}
    runs = {*joint.forward, *partition.forward}
    for node in joint.module.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node in runs:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    last: dict[fx.Node, Run] = {}
    for run in partition.backward:
        copies[run] = graph.node_copy(run.node, {each: copies[read] for each, read in run.reads.items()}.__getitem__)
        last[run.node] = run
        if run.node in runs:
            copies[run].meta["partitioner_tag"] = "is_backward"
            copies[run].meta.pop("recompute", None)
    end = joint.module.graph.output_node()
    returned: Any = end.args[0]
    outputs = [copies.get(each) for each in returned[: joint.num_outputs]]
    gradients = [copies.get(last.get(each, each)) for each in returned[joint.num_outputs :]]
    graph.output((*outputs, *gradients)).meta = dict(end.meta)
    module = fx.GraphModule(joint.module, graph)

    saved = [
        copies[node]
        for node in sorted(partition.saved, key=joint.order.__getitem__)
        # AOTAutograd itself passes constants, random seeds and backward state to the backward.
        if not (node.op == "get_attr" or is_bwd_seed_offset(node) or partitioners._is_backward_state(node))
    ]
    numbers = [node for node in saved if is_number(node)]
    options: dict[str, Any] = {}
    # torch 2.13 takes opaque objects (not tensors) as a separate list; torch 2.11 finds them itself.
    if is_opaque := getattr(graph_compile, "is_opaque_node", None):
        options["saved_opaque_nodes"] = [node for node in saved if is_opaque(node)]
    apart = {*numbers, *options.get("saved_opaque_nodes", ())}
    rest = [node for node in saved if node not in apart]
    static = set(static_inputs or ())
    primals = [node for node in graph.find_nodes(op="placeholder") if is_primal(node)]
    forward, backward = partitioners._extract_fwd_bwd_modules(
        module,
        rest,
        saved_sym_nodes=numbers,
        num_fwd_outputs=joint.num_outputs,
        static_lifetime_input_nodes=OrderedSet(node for position, node in enumerate(primals) if position in static),
        **options,
    )
    # Remove random operators, such as attention, whose results no node reads: PyTorch counts them as impure.
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    return forward, partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)


# Inductor is assumed to fuse all operators up to the next matrix product, convolution or attention, which it does not
# compile itself, into one kernel. Values that only this kernel reads are in registers, and its inputs in memory.


def in_registers(joint: JointGraph, runs: Sequence[Run], ends: Collection[object]) -> set[Run]:
    """Return the runs of fused operators whose values need no memory, and views of these values.

    In memory are `ends`, results of reductions, and values read by several kernels or by an operator that is not fused.
    """
    kinds = partitioners.get_default_op_list()
    readers: dict[Run, list[int]] = {}
    for position, run in enumerate(runs):
        for each in run.reads.values():
            if isinstance(each, Run):
                readers.setdefault(each, []).append(position)
    views = [kinds.is_view(run.node) for run in runs]
    apart = [
        not view and not kinds.is_fusible(run.node) and bool(joint.allocations[run.node])
        for view, run in zip(views, runs, strict=True)
    ]
    kernel = list(accumulate(apart))

    def read_at(run: Run) -> list[int] | None:
        if run in ends:
            return None
        found: list[int] = []
        for position in readers.get(run, ()):
            further = read_at(runs[position]) if views[position] else [position]
            if further is None:
                return None
            found += further
        return found

    inside: set[Run] = set()
    for position, run in enumerate(runs):
        if views[position]:
            if any(each in inside for each in run.reads.values()):
                inside.add(run)
            continue
        one = isinstance(run.node.meta.get("val"), torch.Tensor)
        if not one or not kinds.is_fusible(run.node) or kinds.is_random(run.node) or reduces(run.node):
            continue
        found = read_at(run)
        if found and not any(apart[each] for each in found) and kernel[min(found)] == kernel[max(found)]:
            inside.add(run)
    return inside


# The peak of a partition in bytes is the largest sum, over all operators in order, of the memory live while one runs:
#
#     the whole step    parameters, buffers and inputs, which the caller holds
#     forward           values still to be read, returned or saved, and the operator's scratch memory
#     loss              saved values, outputs and their gradients, and the loss's own memory
#     backward          saved values still to be read; outputs, which the caller holds until the step ends, and their
#                       gradients; computed gradients of inputs; temporaries; the operator's scratch memory
#
# Each storage counts once: a view adds nothing, but keeps its base alive. In fused code, values in registers
# add nothing, and a kernel overwrites inputs that it is the last to read. Which operators Inductor fuses is known only
# after compilation, so the peak is then an estimate, and the caller measures the code.


_Memory = dict[int, "_Block"]  # maps the storages of a value to their blocks


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    last: int = 0  # position of the last run that reads the block


@dataclass(frozen=True, slots=True)
class Weight:
    """Predicted costs of a step: peak bytes, saved bytes, seconds (with `Cost.keeping`), and seconds to recompute."""

    peak: int
    saved: int
    seconds: float
    replayed_seconds: float
    curve: tuple[int, ...] = field(default=(), repr=False)  # live bytes during each run of the backward

    def taking_longer(self, factor: float) -> Weight:
        return replace(self, seconds=factor * self.seconds, replayed_seconds=factor * self.replayed_seconds)


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """Costs of the operators of a joint graph."""

    joint: JointGraph
    operators: dict[fx.Node, Cost]
    estimated: bool = False  # whether to estimate the peaks of code in which Inductor fuses operators
    loss: int = 0  # bytes that the loss holds between forward and backward, beyond the outputs and their gradients

    @classmethod
    def of(cls, joint: JointGraph, *, fused: bool, estimated: bool = False, loss: int = 0) -> GraphCosts:
        if not fused:
            return cls(joint, operator_costs(joint), loss=loss)
        mkldnn = torch.backends.mkldnn  # where oneDNN is available, Inductor chooses the layouts of images on the CPU
        optimized = torch_compat.inductor_config.layout_optimization
        inductor = bool(optimized and mkldnn.enabled and mkldnn.is_available())
        return cls(joint, fused_costs(joint, operator_costs(joint, inductor=inductor)), estimated, loss)


def weigh(costs: GraphCosts, partition: Partition) -> Weight:
    """Simulate a step of `partition`, and return its costs."""
    joint, operators = costs.joint, costs.operators
    steps: dict[fx.Node, Run] = {}
    for node in partition.forward:
        steps[node] = Run(node, {each: steps.get(each, each) for each in node.all_input_nodes})
    caller = _blocks(joint, joint.primals)
    ends = [steps.get(node, node) for node in (*joint.outputs, *partition.saved)]
    forward = _live_bytes(costs, list(steps.values()), ends, dict(caller), {})

    # The gradients of outputs stay in memory in the backward: autograd's engine or the caller holds them.
    held = _blocks(joint, [*joint.outputs, *joint.tangents]) | caller
    kept = {storage: block for storage, block in _blocks(joint, partition.saved).items() if storage not in held}
    last = {run.node: run for run in partition.backward}
    ends = [last.get(node, node) for node in joint.gradients]
    curve = _live_bytes(costs, list(partition.backward), ends, held, kept)
    ran = (*partition.forward, *(run.node for run in partition.backward))
    roots, own = {joint.root.get(node, node) for node in partition.saved}, set(partition.forward)
    return Weight(
        max(*forward, curve[0] + costs.loss, *curve),
        sum(block.size for block in kept.values()),
        sum(operators[n].seconds for n in ran) + sum(operators[n].keeping for n in roots if n in operators),
        sum(operators[run.node].seconds for run in partition.backward if run.node in own),
        tuple(curve[1:]),
    )


def _blocks(joint: JointGraph, nodes: Iterable[fx.Node]) -> _Memory:
    return {storage: _Block(size) for node in nodes for storage, size in joint.allocations[node].items()}


def _live_bytes(
    costs: GraphCosts, runs: list[Run], ends: list[Run | fx.Node], held: _Memory, incoming: _Memory
) -> list[int]:
    """Return the live bytes before the first of `runs`, then during each. Frees only `incoming` and what runs make."""
    joint, fused, made = costs.joint, costs.estimated, dict[Run, _Memory]()

    def memory(value: Run | fx.Node) -> _Memory:
        if isinstance(value, Run):
            return made[value]
        sizes = joint.allocations[value]
        return {s: block for s in sizes if (block := held.get(s) or incoming.get(s)) is not None}

    inside = in_registers(joint, runs, set(ends)) if fused else set()
    new: list[list[_Block]] = []
    read: list[list[_Block]] = []
    for position, run in enumerate(runs):
        behind: _Memory = {}
        for each in run.reads.values():
            behind |= memory(each)
        own = behind
        if run not in inside:
            own = {s: behind[s] if s in behind else _Block(size) for s, size in joint.allocations[run.node].items()}
        made[run] = own
        new.append([block for storage, block in own.items() if storage not in behind])
        read.append([*behind.values(), *new[-1]])
        for block in read[-1]:
            block.last = position
    stay = {*held.values(), *(block for end in ends for block in memory(end).values())}
    live = sum(block.size for block in (held | incoming).values())
    curve = [live]
    kinds = partitioners.get_default_op_list()  # outside the loop: PyTorch builds the list anew at each call
    for position, run in enumerate(runs):
        live += sum(block.size for block in new[position])
        ended = {block for block in read[position] if block.last == position} - stay
        over = 0
        if fused and kinds.is_fusible(run.node):
            # A fused kernel writes its results over inputs of the same size that it is the last to read.
            free = Counter(block.size for block in ended.difference(new[position]))
            sizes = Counter(block.size for block in new[position])
            over = sum(size * min(count, free[size]) for size, count in sizes.items())
        curve.append(live + costs.operators[run.node].scratch - over)
        live -= sum(block.size for block in ended)
    return curve
