"""Plans that may keep checkpoints in fewer bits, with a bound for all of them."""

from rotor_solver.rounded.solve_rounded import least_rounded_sequence, solve_rounded

__all__ = ["least_rounded_sequence", "solve_rounded"]
