"""Partitions of compiled stages by the budgets that PyTorch's partitioner has.

What to keep is what PyTorch's own partitioner would. The graphs are ours: with a budget, PyTorch's draw the random
numbers of a dropout anew in the backward (seen in torch 2.13), and ours draw nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from rotor_py.partition.budgets.survey import Survey
from rotor_py.partition.choice import programs_by_budgets
from rotor_py.partition.extract import extract
from rotor_py.partition.joint_graph import JointGraph
from rotor_py.partition.partitioner import code_digest, prepare


class StagePartitions:
    """The partitions of stages by budgets."""

    def survey(self) -> CustomPartitionerFn:
        return Survey()

    def within(self, budget: float) -> CustomPartitionerFn:
        return _Within(budget)


@dataclass(frozen=True)
class _Within(CustomPartitionerFn):
    """Partitions a graph by a budget."""

    budget: float

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The graphs of the forward and of the backward."""
        num_outputs: int = kwargs["num_fwd_outputs"]
        static_inputs: list[int] | None = kwargs.get("static_lifetime_input_indices")
        prepare(gm)
        joint = JointGraph(gm, num_outputs)
        if not joint.backward:
            return partitioners.default_partition(
                gm, joint_inputs, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static_inputs
            )
        (program,) = programs_by_budgets(joint, [self.budget])
        return extract(joint, program, static_inputs)

    def uuid(self) -> str:
        """What tells PyTorch's caches of compiled graphs apart: the budget, and this code."""
        return f"rotor_py.compiled.budgets {self.budget} {code_digest()}"
