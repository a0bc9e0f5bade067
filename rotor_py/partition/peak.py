"""The peak of a partitioned graph in bytes: what is live while every operator runs, in the order in which they run.

    held throughout   what the caller has: parameters, buffers, inputs
    forward           what is still read, returned or saved, and the scratch memory of the operator that runs
    loss              what is saved, outputs and their gradients, and what the loss takes beside them
    backward          what is saved and still read; outputs, which the caller holds until the step ends, and their
                      gradients; gradients of inputs, as soon as they are made; values in between; scratch memory

Memory is counted by storages: views cost nothing, and keep what they view. Where operators are `fused`, what stays in
registers costs nothing either, and a kernel writes its result over what it reads last. How Inductor fuses is only known
once it has: the peak is then an estimate, for code that is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx
from torch._functorch import partitioners

from rotor_py.partition.costs.operator_costs import Cost
from rotor_py.partition.joint_graph import JointGraph
from rotor_py.partition.program import Program, Run
from rotor_py.partition.registers import in_registers

_Memory = dict[int, "_Block"]
"""The memory behind a value: blocks, by the storage of the joint graph that each stands for."""


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    last: int = 0
    """The position of the last run that reads it."""
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """What a program costs: its peak in bytes, what it saves, the seconds of all its operators and of what it keeps."""

    peak: int
    forward_peak: int
    backward_peak: int
    saved: int
    seconds: float
    replayed_seconds: float
    curve: tuple[int, ...] = field(default=(), repr=False)
    """Bytes while every run of the backward runs."""


def weigh(
    joint: JointGraph, costs: dict[fx.Node, Cost], program: Program, *, fused: bool = False, loss: int = 0
) -> Weight:
    """Run `program` in numbers; `loss` are the bytes that its loss takes beside its outputs and their gradients."""
    steps: dict[fx.Node, Run] = {}
    for node in program.forward:
        steps[node] = Run(node, {each: steps.get(each, each) for each in node.all_input_nodes})
    caller = _blocks(joint, joint.primals)
    forward = _Machine(joint, costs, dict(caller), fused=fused)
    ends = [steps.get(node, node) for node in (*joint.outputs, *program.saved)]
    forward_peak = max(forward.run(list(steps.values()), ends))

    # Autograd's engine, or the caller of backward, holds gradients of outputs until the backward returns.
    held = _blocks(joint, [*joint.outputs, *joint.tangents]) | caller
    kept = {storage: block for storage, block in _blocks(joint, program.saved).items() if storage not in held}
    backward = _Machine(joint, costs, held, kept, fused=fused)
    last = {run.node: run for run in program.backward}
    curve = backward.run(list(program.backward), [last.get(node, node) for node in joint.gradients])
    backward_peak = max(curve)
    loss_peak = curve[0] + loss
    saved = sum(block.size for block in kept.values())
    replayed = sum(costs[node].seconds for node in program.replayed)
    ran = (*program.forward, *(run.node for run in program.backward))
    seconds = sum(costs[node].seconds for node in ran)
    roots = {joint.root.get(node, node) for node in program.saved}
    seconds += sum(costs[node].keeping for node in roots if node in costs)
    return Weight(
        max(forward_peak, loss_peak, backward_peak),
        forward_peak,
        backward_peak,
        saved,
        seconds,
        replayed,
        tuple(curve[1:]),
    )


def _blocks(joint: JointGraph, nodes: Iterable[fx.Node]) -> _Memory:
    return {storage: _Block(size) for node in nodes for storage, size in joint.allocations[node].items()}


@dataclass
class _Machine:
    joint: JointGraph
    costs: dict[fx.Node, Cost]
    held: _Memory
    """What stays throughout."""
    incoming: _Memory = field(default_factory=dict)
    """What is there at the start, and freed when it has been read."""
    fused: bool = False

    def __post_init__(self) -> None:
        for block in self.held.values():
            block.stays = True
        self.made: dict[Run, _Memory] = {}

    def run(self, runs: list[Run], ends: Iterable[Run | fx.Node]) -> list[int]:
        """What is live before anything runs, and while each of `runs` runs, one after the other; `ends` stay."""
        ends = list(ends)
        inside = in_registers(self.joint, runs, set(ends)) if self.fused else set()
        new: list[list[_Block]] = []
        read: list[list[_Block]] = []
        for position, run in enumerate(runs):
            behind: _Memory = {}
            for each in run.reads.values():
                behind |= self._memory(each)
            own = behind
            if run not in inside:
                sizes = self.joint.allocations[run.node]
                own = {s: behind[s] if s in behind else _Block(size) for s, size in sizes.items()}
            self.made[run] = own
            fresh = [block for storage, block in own.items() if storage not in behind]
            touched = [*behind.values(), *fresh]
            for block in touched:
                block.last = position
            new.append(fresh)
            read.append(touched)
        for end in ends:
            for block in self._memory(end).values():
                block.stays = True
        start = self.held | self.incoming
        live = sum(block.size for block in start.values())
        curve = [live]
        freed: set[_Block] = set()
        kinds = partitioners.get_default_op_list()  # PyTorch makes it anew for whoever asks
        for position, run in enumerate(runs):
            live += sum(block.size for block in new[position])
            ended = [
                block for block in read[position] if block.last == position and not block.stays and block not in freed
            ]
            fused = self.fused and kinds.is_fusible(run.node)
            written_over = _written_over(new[position], ended) if fused else 0
            curve.append(live + self.costs[run.node].scratch - written_over)
            freed.update(ended)
            live -= sum(block.size for block in ended)
        return curve

    def _memory(self, value: Run | fx.Node) -> _Memory:
        if isinstance(value, Run):
            return self.made[value]
        sizes = self.joint.allocations[value]
        return {s: block for s in sizes if (block := self.held.get(s) or self.incoming.get(s)) is not None}


def _written_over(new: list[_Block], ended: list[_Block]) -> int:
    """Bytes of what a fused operator makes in the place of what it reads last."""
    free = Counter(block.size for block in ended if block not in new)
    return sum(size * min(count, free[size]) for size, count in Counter(block.size for block in new).items())
