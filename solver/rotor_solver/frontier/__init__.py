"""The whole trade-off between memory and time: found once, and a value to ask."""

from rotor_solver.frontier.find_frontier import frontier, limit_for
from rotor_solver.frontier.step_function import Frontier

__all__ = ["Frontier", "frontier", "limit_for"]
