"""A joint graph as a chain of stages, for the solver.

The forward is cut where little is live. A stage is what runs between two cuts. Its input is what is live at the first
of them, its options are what it may keep for its backward (`kept_parts.py`).
"""

from __future__ import annotations

from functools import cached_property

from torch import fx

from rotor_py.partition.chain.kept_parts import KeptParts
from rotor_py.partition.peak import weigh
from rotor_py.partition.program import in_time
from rotor_solver import Chain, Option, Stage


class Stages(KeptParts):
    """The stages of a joint graph, in seconds and bytes."""

    def chain(self, *, keep_outputs: bool) -> Chain:
        """The stages in seconds and bytes; with `keep_outputs`, who keeps anything keeps the stage's output as well.

        Approximate: what is live inside a stage depends on the stages around it.
        """
        seconds = [sum(self.costs[node].seconds for node in nodes) for nodes in self.backward]
        stages = []
        for number, members in enumerate(self.members):
            forward = sum(self.costs[node].seconds for node in members)
            output = self._output(number)
            scratch = max((self.costs[node].scratch for node in members), default=0)
            options = tuple(
                Option(
                    forward + sum(self.costs[node].keeping for node in kept),
                    seconds[number] + self.again(number, kept),
                    self.joint_bytes(kept | output if keep_outputs else kept),
                    scratch,
                    self._temps[level][number],
                )
                for kept, level in zip(self.kept[number], self.levels_kept[number], strict=True)
            )
            inside = max(map(self.joint.bytes_of, self.inside[number]), default=0)
            stages.append(
                Stage(self.joint_bytes(output), options, forward, scratch + inside, gradient=self._gradients[number])
            )
        return Chain(tuple(stages), 0)

    def _output(self, number: int) -> set[fx.Node]:
        """What a stage makes for later ones. What an earlier stage has made is there already, whoever keeps it."""
        return {value for value in self.inputs[number + 1] if self.stage_of[value] == number}

    @cached_property
    def backward(self) -> list[list[fx.Node]]:
        """By stage, the nodes of its backward: up to the last one that reads what the stage has made."""
        joint = self.joint
        latest = 0
        found: list[list[fx.Node]] = [[] for _ in self.members]
        for node in reversed(joint.backward):
            read = (
                self.stage_of[joint.root[each]]
                for each in node.all_input_nodes
                if joint.root.get(each) in self.stage_of
            )
            latest = max(latest, *read, 0)
            found[latest].append(node)
        return [nodes[::-1] for nodes in found]

    @cached_property
    def _gradients(self) -> list[int]:
        """By stage, the bytes of gradients that its backward returns."""
        returned = set(self.joint.gradients)
        return [self.joint_bytes({node for node in nodes if node in returned}) for nodes in self.backward]

    @cached_property
    def _temps(self) -> list[list[int]]:
        """By level and stage, the most that the stage's backward needs beyond what is kept, and gradients around it."""
        stage_of = {node: number for number, nodes in enumerate(self.backward) for node in nodes}
        found = []
        for level in range(self.levels):
            kept = self.part(level)
            program = in_time(self.joint, kept)
            curve = weigh(self.joint, self.costs, program).curve
            most = [0] * len(self.members)
            number = 0
            for run, live in zip(reversed(program.backward), reversed(curve), strict=True):
                number = stage_of.get(run.node, number)  # what runs again belongs to what comes next
                most[number] = max(most[number], live)
            held = self.joint_bytes({*self.joint.primals, *self.joint.tangents, *self.shared}) + sum(self._gradients)
            temps = []
            for number, inside in enumerate(self.inside):
                held += self.joint_bytes(kept & set(inside))
                held -= self._gradients[number]
                incoming = self.joint_bytes(self._output(number - 1)) if number else 0
                temps.append(max(-incoming, most[number] - held - self.joint_bytes(self._output(number)) - incoming))
            found.append(temps)
        return found
