"""What tests leave out, and what they start as well: it takes long, and they say nothing about it."""

import pytest
import torch._dynamo.guards

TIMED_ONCE = {
    "rotor_profiling.timing.ENOUGH_SECONDS": 0.0,
    "rotor_py.measure.rounds.FEWEST_ROUNDS": 1,
    "rotor_py.measure.rounds.MOST_ROUNDS": 0,
}
"""Few tests depend on a time, and say so. For all others a stage is timed once."""


def time_stages_once(patch: pytest.MonkeyPatch) -> None:
    for name, value in TIMED_ONCE.items():
        patch.setattr(name, value)


def time_no_guards() -> None:
    """For each graph, TorchDynamo flushes the caches of the CPU, to log how long its guards take: 20 milliseconds."""
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):  # a private function
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
