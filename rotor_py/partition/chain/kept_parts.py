"""What a stage may keep for its backward: all that is read there, or less, from which operators make it again.

Less is the fewest bytes from which operators that are fast for what they return make it again: a minimum cut, as in
`capture/graph/selective_recompute.py`, once for each of a few thresholds of "fast".
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx
from torch._functorch import partitioners

from rotor_py.partition.chain.cut_forward import CutForward
from rotor_py.partition.chain.values import source_of
from rotor_py.partition.costs.operator_costs import Cost
from rotor_py.partition.joint_graph import usually_saved
from rotor_solver.max_flow import Network

_THRESHOLDS = 6
"""How many different limits of seconds for a byte are tried in cuts of a stage. A guess."""


@dataclass
class KeptParts(CutForward):
    """What the stages may keep, each by itself, and all together."""

    costs: dict[fx.Node, Cost]
    levels_kept: list[list[int]] = field(default_factory=list)
    """By stage and option, how fast is fast enough in it; there with `kept`."""

    @cached_property
    def kept(self) -> list[list[frozenset[fx.Node]]]:
        """By stage, what each of its options keeps."""
        return [self._options(number) for number in range(len(self.members))]

    def _options(self, number: int) -> list[frozenset[fx.Node]]:
        inside = self.inside[number]
        targets = frozenset(value for value in inside if value in self.read_backward)
        found = [targets]
        self.levels_kept.append([0])
        for level, (again, everywhere) in enumerate(self._cuts_everywhere, 1):
            alone = self._cut(inside, targets, again)
            # Whatever is made again from the stage's input needs it.
            alone |= set(self.inputs[number]) & self._needed(number, alone) - self.read_backward
            for option in (frozenset(alone), everywhere & set(inside)):
                if option not in found and self.joint_bytes(option) < self.joint_bytes(targets):
                    found.append(option)
                    self.levels_kept[-1].append(level)
        return found

    @cached_property
    def everywhere(self) -> list[frozenset[fx.Node]]:
        """By level, the least to keep of the whole graph, if what the level allows may run again anywhere."""
        return [kept for _, kept in self._cuts_everywhere]

    @cached_property
    def _cuts_everywhere(self) -> list[tuple[Set[fx.Node], frozenset[fx.Node]]]:
        """What may run again, and what is kept then; what keeps most comes first."""
        inside = [value for values in self.inside for value in values]
        targets = self.read_backward - self.shared
        found = {frozenset(self._cut(inside, targets, again)): again for again in self._allowed}
        return sorted(((again, kept) for kept, again in found.items()), key=lambda pair: -self.joint_bytes(pair[1]))

    @cached_property
    def _allowed(self) -> list[Set[fx.Node]]:
        """Values that may run again: those that take few seconds for a byte, and those that compilers fuse."""
        joint = self.joint
        replayed = [value for value in self.values if value in joint.replayable]
        rates = sorted({self._rate(value) for value in replayed})
        if not rates:
            return []
        limits = sorted({rates[(len(rates) - 1) * step // _THRESHOLDS] for step in range(1, _THRESHOLDS + 1)})
        found: list[Set[fx.Node]] = [{value for value in replayed if self._rate(value) <= limit} for limit in limits]
        kinds = partitioners.get_default_op_list()
        fused = {value for value in replayed if not kinds.is_compute_intensive(source_of(value))}
        # What PyTorch's partitioner would keep without a budget, and with a large one.
        kept = ({joint.root.get(node) for node in saved} for saved in usually_saved(joint))
        return [*found, fused, *(set(replayed) - each for each in kept)]

    def _rate(self, value: fx.Node) -> float:
        source = source_of(value)
        return self.costs[source].seconds / max(1, self.joint.bytes_of(source))

    def _cut(self, inside: list[fx.Node], targets: Set[fx.Node], again: Set[fx.Node]) -> set[fx.Node]:
        """The least bytes of the values `inside` from which `targets` can be made by running `again`."""
        joint = self.joint
        flow = Network("made", "read")
        mine = set(inside)
        for value in inside:
            flow.add_edge((value, "made"), (value, "kept"), joint.bytes_of(value))
            if value in targets:
                flow.add_edge((value, "kept"), "read")
            if value not in again:
                flow.add_edge("made", (value, "made"))
            for each in self.reads[value] & mine:
                flow.add_edge((each, "kept"), (value, "made"))
        behind = flow.behind_least_cut()
        return {value for value in inside if (value, "kept") in behind and (value, "made") not in behind}

    def _needed(self, number: int, kept: Set[fx.Node]) -> set[fx.Node]:
        """What the backward of a stage reads or runs again if the forward keeps `kept`, and what that reads."""
        inside, found = set(self.members[number]), set[fx.Node]()
        pending = [value for value in self.inside[number] if value in self.read_backward]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            if node in inside and node not in kept and node not in self.shared:
                pending.extend(self.joint.root.get(each, each) for each in self.joint.sources(node))
                pending.extend(self.joint.sources(node))
        return found

    def again(self, number: int, kept: frozenset[fx.Node]) -> float:
        """Seconds to make what the backward of a stage reads from `kept` and the stage's input."""
        inside = set(self.members[number]) - kept - self.shared
        return sum(self.costs[node].seconds for node in self._needed(number, kept) & inside)

    def part(self, level: int) -> Set[fx.Node]:
        """What all stages keep: with level 0 all that the backward reads, with each further one less."""
        return (self.read_backward if level == 0 else self.everywhere[level - 1]) | self.shared

    @property
    def levels(self) -> int:
        return len(self.everywhere) + 1
