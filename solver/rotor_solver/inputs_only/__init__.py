"""Schedules that store inputs: Revolve, the best one for stages that differ, and checkpoints at regular distances."""

from rotor_solver.inputs_only.heterogeneous import GriewankHeterogeneous
from rotor_solver.inputs_only.periodic import Periodic, Sqrt
from rotor_solver.inputs_only.revolve import Revolve, forward_steps

__all__ = ["GriewankHeterogeneous", "Periodic", "Revolve", "Sqrt", "forward_steps"]
