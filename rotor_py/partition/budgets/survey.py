"""What partitions by budgets would cost a compiled stage, before any of them is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from rotor_py.compiled.budgets import BUDGETS, Foreseen, OnlySurveyedError, way_of
from rotor_py.partition.choice import Candidate, by_budgets
from rotor_py.partition.joint_graph import JointGraph
from rotor_py.partition.partitioner import prepare


class Survey(CustomPartitionerFn):
    """Looks at the partitions of a graph, and ends the compilation."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Raises OnlySurveyedError."""
        prepare(gm)
        joint = JointGraph(gm, kwargs["num_fwd_outputs"])
        if not joint.backward:
            raise OnlySurveyedError(())
        usual, *others = by_budgets(joint, [1, *BUDGETS])
        ways = zip(map(way_of, BUDGETS), others, strict=True)
        raise OnlySurveyedError(tuple(_foreseen(way, other, usual) for way, other in ways))

    def uuid(self) -> str:
        """Of no matter, since nothing is compiled that could be found again."""
        return "rotor_py.compiled.budgets"


def _foreseen(way: str, found: Candidate, usual: Candidate) -> Foreseen:
    weight, before = found.weight, usual.weight
    temp = (weight.backward_peak - weight.saved) - (before.backward_peak - before.saved)
    return Foreseen(way, weight.saved, before.saved, temp, weight.seconds / max(before.seconds, 1e-12))
