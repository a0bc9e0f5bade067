"""The best memory-persistent sequence. Begin with `recurrence`; `program` is how it is solved for long chains."""

from rotor_solver.persistent.program import Persistent

__all__ = ["Persistent"]
