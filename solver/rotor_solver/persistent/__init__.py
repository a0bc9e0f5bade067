"""Find the best memory-persistent sequence. Begin with `recurrence.optimum`, which states the recurrence."""

from rotor_solver.persistent.recurrence import Persistent

__all__ = ["Persistent"]
