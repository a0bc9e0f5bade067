"""The peak of a program in bytes, with values that fusion keeps in registers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import fx

from rotor_profiling.torch_compat import partitioners
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.operator_costs import Cost, fused_costs, operator_costs, reduces
from rotor_py.compile.program import Program, Run

# Find the values of a compiled graph that never reach memory: one kernel makes and reads them.
#
# Inductor fuses consecutive operators, up to the next one that it does not compile itself: a matrix product, a
# convolution, attention. Values between fused operators stay in registers. Instead, their sources stay in memory until
# they have been read.


def in_registers(joint: JointGraph, runs: Sequence[Run], ends: Collection[object]) -> set[Run]:
    """Return the runs whose values stay in registers, and views of these; `ends` are kept in memory.

    A reduced value is small, and counts as memory. So does a value read on both sides of an operator that Inductor does
    not compile.
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
        """Return the positions that read a value, through views as well; None if it is kept."""
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


# The peak of a partitioned graph in bytes: the memory live while each operator runs, in order.
#
#     held throughout   the caller's: parameters, buffers, inputs
#     forward           values still read, returned or saved, and the running operator's scratch memory
#     loss              saved values, outputs and their gradients, and the loss's own memory
#     backward          saved values still to be read; outputs, which the caller holds until the step ends, and their
#                       gradients; gradients of inputs, once made; temporaries; scratch memory
#
# Memory is counted by storages: views cost nothing, and keep their base. With `fused` operators, values in registers
# cost nothing either, and a kernel overwrites inputs that it is the last to read. Inductor's fusion is known only
# afterwards: the peak is then an estimate, for code that is measured.


_Memory = dict[int, "_Block"]
"""The memory behind a value: blocks, by storage of the joint graph."""


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    last: int = 0
    """The position of the last run that reads it."""
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """The costs of a program: peak and saved bytes, and the seconds of all its operators and kept values."""

    peak: int
    forward_peak: int
    backward_peak: int
    saved: int
    seconds: float
    replayed_seconds: float
    curve: tuple[int, ...] = field(default=(), repr=False)
    """Live bytes during each run of the backward."""


def weigh(
    joint: JointGraph, costs: dict[fx.Node, Cost], program: Program, *, fused: bool = False, loss: int = 0
) -> Weight:
    """Simulate `program`; `loss` are the bytes of its loss beyond its outputs and their gradients."""
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
    """Memory held throughout."""
    incoming: _Memory = field(default_factory=dict)
    """Memory in use at the start, and freed after its last read."""
    fused: bool = False

    def __post_init__(self) -> None:
        for block in self.held.values():
            block.stays = True
        self.made: dict[Run, _Memory] = {}

    def run(self, runs: list[Run], ends: Iterable[Run | fx.Node]) -> list[int]:
        """Return the live bytes before the first of `runs`, and during each, in order; `ends` stay."""
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
        kinds = partitioners.get_default_op_list()  # PyTorch builds it anew at each call
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
    """Return the bytes of a fused operator's results that overwrite inputs after their last read."""
    free = Counter(block.size for block in ended if block not in new)
    return sum(size * min(count, free[size]) for size, count in Counter(block.size for block in new).items())


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """Operators' costs: `usual` ones, and those for a backward that recomputes a convolution.

    Inductor then uses another layout for the images of all convolutions.
    """

    joint: JointGraph
    usual: dict[fx.Node, Cost]
    convolving_again: dict[fx.Node, Cost]
    estimated: bool = False
    """Whether peaks are estimates for fused code."""
    loss: int = 0
    """Bytes in use between forward and backward, beyond the outputs and their gradients."""

    @classmethod
    def of(cls, joint: JointGraph, *, fused: bool, estimated: bool = False, loss: int = 0) -> GraphCosts:
        """Measure operators that run one by one, or `fused` by Inductor."""
        if not fused:
            alone = operator_costs(joint)
            return cls(joint, alone, alone, loss=loss)
        inductor = _lays_out()
        found = (operator_costs(joint, inductor=inductor, convolves_again=again) for again in (False, True))
        usual, convolving_again = (fused_costs(joint, each) for each in found)
        return cls(joint, usual, convolving_again, estimated, loss)

    @property
    def faster_again(self) -> bool:
        """Whether some operator is faster if the backward recomputes a convolution."""
        return any(self.convolving_again[node].seconds < cost.seconds for node, cost in self.usual.items())

    def weigh(self, program: Program) -> Weight:
        """Return the peak and the seconds of `program`."""
        again = any(node.target is torch.ops.aten.convolution.default for node in program.replayed)
        costs = self.convolving_again if again else self.usual
        return weigh(self.joint, costs, program, fused=self.estimated, loss=self.loss)


def _lays_out() -> bool:
    """Whether Inductor chooses image layouts itself, on the CPU."""
    from rotor_profiling.torch_compat import inductor_config as config

    return bool(config.layout_optimization and torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available())
