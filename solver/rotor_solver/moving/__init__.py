"""Offload saved tensors over a link: choose the stages and the times of their copies.

Begin with Note [Moves] at `sequence.Moves`.
"""

from rotor_solver.moving.lagrangian import MovingPlan, solve_moving
from rotor_solver.moving.plan_moves import plan_moves
from rotor_solver.moving.transfers import Link, MovesSimulation, Transfer, simulate_moves, timed_moments, transfers
from rotor_solver.sequence import Moves

__all__ = [
    "Link",
    "Moves",
    "MovesSimulation",
    "MovingPlan",
    "Transfer",
    "plan_moves",
    "simulate_moves",
    "solve_moving",
    "timed_moments",
    "transfers",
]
