"""What stages keep, moved out of memory over a link and back before it is needed: what, and when.

Begin with Note [Moves] in `moves`.
"""

from rotor_solver.moving.link import Link
from rotor_solver.moving.moves import Moves
from rotor_solver.moving.plan_moves import plan_moves
from rotor_solver.moving.simulate_moves import MovesSimulation, Transfer, simulate_moves
from rotor_solver.moving.solve_moving import MovingPlan, solve_moving
from rotor_solver.moving.timed_moments import timed_moments, transfers

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
