"""Train a PyTorch model inside a memory limit given in bytes, at the least extra time, with the same numbers."""

from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import InfeasibleError, PlanMismatchError, UnsupportedModelError
from rotor_py.executor import CheckpointOptim
from rotor_py.plan import Plan
from rotor_py.units import format_bytes, parse_bytes
from rotor_solver import (
    Chain,
    Floating,
    Frontier,
    GriewankHeterogeneous,
    Option,
    Periodic,
    Persistent,
    RecomputeAll,
    Revolve,
    Sequence,
    Simulation,
    Sqrt,
    Stage,
    StoreAll,
    frontier,
    limit_for,
    min_bytes,
    recompute_all,
    simulate,
    solve,
    store_all,
)

__all__ = [
    "Chain",
    "CheckpointOptim",
    "Checkpointable",
    "Floating",
    "Frontier",
    "GriewankHeterogeneous",
    "InfeasibleError",
    "Option",
    "Periodic",
    "Persistent",
    "Plan",
    "PlanMismatchError",
    "RecomputeAll",
    "Revolve",
    "Sequence",
    "Simulation",
    "Sqrt",
    "Stage",
    "StoreAll",
    "UnsupportedModelError",
    "format_bytes",
    "frontier",
    "limit_for",
    "min_bytes",
    "parse_bytes",
    "recompute_all",
    "simulate",
    "solve",
    "store_all",
]
