"""Find the fastest memory-persistent sequence: it drops a checkpoint only at the backward that uses the checkpoint."""

from rotor_solver.persistent.recurrence import Persistent

__all__ = ["Persistent"]
