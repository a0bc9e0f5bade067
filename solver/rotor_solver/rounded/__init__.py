"""Plans that may keep checkpoints in fewer bits, with a bound for all of them."""

from rotor_solver.rounded.relaxed_chain import may_round, relaxed_chain
from rotor_solver.rounded.solve_rounded import least_rounded_sequence, solve_rounded

__all__ = ["least_rounded_sequence", "may_round", "relaxed_chain", "solve_rounded"]
