"""What a program of a graph costs, by the costs of the graph's operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from rotor_py.partition.costs.fused_costs import fused_costs
from rotor_py.partition.costs.operator_costs import Cost, operator_costs
from rotor_py.partition.joint_graph import JointGraph
from rotor_py.partition.peak import Weight, weigh
from rotor_py.partition.program import Program


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """The costs of operators: `usual` ones, and those where the backward runs a convolution of the forward again.

    Inductor then lays out the images of all convolutions in another way.
    """

    joint: JointGraph
    usual: dict[fx.Node, Cost]
    convolving_again: dict[fx.Node, Cost]
    estimated: bool = False
    """Whether peaks are those of fused code, as far as they can be known."""
    loss: int = 0
    """Bytes that are taken between the forward and the backward, beside the outputs and their gradients."""

    @classmethod
    def of(cls, joint: JointGraph, *, fused: bool, estimated: bool = False, loss: int = 0) -> GraphCosts:
        """Of operators that run one by one, or `fused` by Inductor."""
        if not fused:
            alone = operator_costs(joint)
            return cls(joint, alone, alone, loss=loss)
        inductor = _lays_out()
        found = (operator_costs(joint, inductor=inductor, convolves_again=again) for again in (False, True))
        usual, convolving_again = (fused_costs(joint, each) for each in found)
        return cls(joint, usual, convolving_again, estimated, loss)

    @property
    def faster_again(self) -> bool:
        """Whether some operator is faster where the backward runs a convolution again."""
        return any(self.convolving_again[node].seconds < cost.seconds for node, cost in self.usual.items())

    def weigh(self, program: Program) -> Weight:
        """The peak and the seconds of `program`."""
        again = any(node.target is torch.ops.aten.convolution.default for node in program.replayed)
        costs = self.convolving_again if again else self.usual
        return weigh(self.joint, costs, program, fused=self.estimated, loss=self.loss)


def _lays_out() -> bool:
    """Whether Inductor lays images out by itself, on the CPU."""
    from torch._inductor import config

    return bool(config.layout_optimization and torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available())
