"""The best sequence whose checkpoints may be dropped early: the program, and its kernels."""

from rotor_solver.floating.program import Floating

__all__ = ["Floating"]
