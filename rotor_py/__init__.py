"""Train a PyTorch model inside a memory limit given in bytes, at the least extra time, with the same numbers."""

from rotor_py.by_hand.by_level import ByLevel
from rotor_py.by_hand.checkpoint_config import CheckpointConfig
from rotor_py.by_hand.checkpointer import ActivationCheckpointer
from rotor_py.by_hand.level_assignment import AssignedLevel, assign_levels
from rotor_py.by_hand.levels import ActivationCheckpointing
from rotor_py.by_hand.network import Checkpoint, CheckpointedNetwork
from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import (
    CheckpointLimitError,
    InfeasibleError,
    MissingCheckpointError,
    PlanMismatchError,
    UnsupportedModelError,
)
from rotor_py.execute.tape import CheckpointOptim
from rotor_py.partition.memory_budget import memory_budget
from rotor_py.plan.saved.plan import Plan
from rotor_py.report import Report
from rotor_py.trials.best_level import LevelChoice, best_level
from rotor_py.trials.comparison import ComparedStrategy, compare
from rotor_py.trials.verification import Verification, verify
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
from rotor_solver.kept_at_loss import PlanMemory, StageMemory

__all__ = [
    "ActivationCheckpointer",
    "ActivationCheckpointing",
    "AssignedLevel",
    "ByLevel",
    "Chain",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointLimitError",
    "CheckpointOptim",
    "Checkpointable",
    "CheckpointedNetwork",
    "ComparedStrategy",
    "Floating",
    "Frontier",
    "GriewankHeterogeneous",
    "InfeasibleError",
    "LevelChoice",
    "MissingCheckpointError",
    "Option",
    "Periodic",
    "Persistent",
    "Plan",
    "PlanMemory",
    "PlanMismatchError",
    "RecomputeAll",
    "Report",
    "Revolve",
    "Sequence",
    "Simulation",
    "Sqrt",
    "Stage",
    "StageMemory",
    "StoreAll",
    "UnsupportedModelError",
    "Verification",
    "assign_levels",
    "best_level",
    "compare",
    "format_bytes",
    "frontier",
    "limit_for",
    "memory_budget",
    "min_bytes",
    "parse_bytes",
    "recompute_all",
    "simulate",
    "solve",
    "store_all",
    "verify",
]
