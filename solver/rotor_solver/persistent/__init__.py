"""The best memory-persistent sequence. Begin with `recurrence`, which has the recurrence first."""

from rotor_solver.persistent.recurrence import Persistent

__all__ = ["Persistent"]
