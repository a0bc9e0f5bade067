"""The best memory-persistent sequence. Begin with `program`, which has the recurrence first."""

from rotor_solver.persistent.program import Persistent

__all__ = ["Persistent"]
