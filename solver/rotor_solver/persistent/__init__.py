"""Find the fastest memory-persistent sequence: in it, a checkpoint is dropped only at the backward that uses it."""

from rotor_solver.persistent.recurrence import Persistent

__all__ = ["Persistent"]
