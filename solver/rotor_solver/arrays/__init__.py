"""What the programs share: a chain as arrays, the least memory by interval, and choices back as operations."""

from rotor_solver.arrays.costs import Costs, Floats, Ints, costs_of

__all__ = ["Costs", "Floats", "Ints", "costs_of"]
