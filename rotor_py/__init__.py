"""Train a PyTorch model inside a memory limit in bytes, at the least extra time, with the results of plain training.

Names are imported on first use, so that `rotor-plan` reports a mistyped option without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotor_py.batch_size.choose import PlannedBatch, best_batch, largest_batch
    from rotor_py.by_hand.checkpointer import ActivationCheckpointer, Checkpoint, CheckpointConfig, CheckpointedNetwork
    from rotor_py.by_hand.levels import ActivationCheckpointing, AssignedLevel, assign_levels
    from rotor_py.by_hand.strategy import ByLevel
    from rotor_py.checkpointable import Checkpointable
    from rotor_py.compile.memory_budget import memory_budget
    from rotor_py.errors import (
        CheckpointLimitError,
        InfeasibleError,
        MissingCheckpointError,
        PlanMismatchError,
        UnsupportedModelError,
    )
    from rotor_py.estimation.estimate import estimate
    from rotor_py.execute.tape import CheckpointOptim
    from rotor_py.plan.saved_plan import Plan
    from rotor_py.report import Report
    from rotor_py.report.sweep import Sweep
    from rotor_py.units import format_bytes, parse_bytes
    from rotor_py.validate.comparison import ComparedStrategy, LevelChoice, best_level, compare, least_limit, sweep
    from rotor_py.validate.verification import Verification, verify
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
    from rotor_solver.memory_timeline import PlanMemory, StageMemory

# Maps each public name to its module, from which `__getattr__` imports it. Only type checkers read the imports above.
_MODULES = {
    name: module
    for module, names in {
        "rotor_py.batch_size.choose": "PlannedBatch best_batch largest_batch",
        "rotor_py.by_hand.checkpointer": "ActivationCheckpointer Checkpoint CheckpointConfig CheckpointedNetwork",
        "rotor_py.by_hand.levels": "ActivationCheckpointing AssignedLevel assign_levels",
        "rotor_py.by_hand.strategy": "ByLevel",
        "rotor_solver": (
            "Chain Floating Frontier GriewankHeterogeneous Option Periodic Persistent RecomputeAll Revolve "
            "Sequence Simulation Sqrt Stage StoreAll frontier limit_for min_bytes recompute_all simulate "
            "solve store_all"
        ),
        "rotor_py.errors": (
            "CheckpointLimitError InfeasibleError MissingCheckpointError PlanMismatchError UnsupportedModelError"
        ),
        "rotor_py.estimation.estimate": "estimate",
        "rotor_py.execute.tape": "CheckpointOptim",
        "rotor_py.checkpointable": "Checkpointable",
        "rotor_py.validate.comparison": "ComparedStrategy LevelChoice best_level compare least_limit sweep",
        "rotor_py.compile.memory_budget": "memory_budget",
        "rotor_py.plan.saved_plan": "Plan",
        "rotor_solver.memory_timeline": "PlanMemory StageMemory",
        "rotor_py.report": "Report",
        "rotor_py.report.sweep": "Sweep",
        "rotor_py.validate.verification": "Verification verify",
        "rotor_py.units": "format_bytes parse_bytes",
    }.items()
    for name in names.split()
}

__all__ = [
    "ActivationCheckpointer", "ActivationCheckpointing", "AssignedLevel", "ByLevel", "Chain", "Checkpoint",
    "CheckpointConfig", "CheckpointLimitError", "CheckpointOptim", "Checkpointable", "CheckpointedNetwork",
    "ComparedStrategy", "Floating", "Frontier", "GriewankHeterogeneous", "InfeasibleError", "LevelChoice",
    "MissingCheckpointError", "Option", "Periodic", "Persistent", "Plan", "PlanMemory", "PlanMismatchError",
    "PlannedBatch", "RecomputeAll", "Report", "Revolve", "Sequence", "Simulation", "Sqrt", "Stage", "StageMemory",
    "StoreAll", "Sweep", "UnsupportedModelError", "Verification", "assign_levels", "best_batch", "best_level",
    "compare", "estimate", "format_bytes", "frontier", "largest_batch", "least_limit", "limit_for", "memory_budget",
    "min_bytes", "parse_bytes", "recompute_all", "simulate", "solve", "store_all", "sweep", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("rotor-plan")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Make it an attribute of this module, so that Python calls this function only once for each name.
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
