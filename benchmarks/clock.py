"""The seconds of a step, on a busy machine as well: the clock stands still while another program has the core."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rotor_profiling.backends import stopwatch


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """What one call of `step` takes on `device`, to the end of what it has begun there."""
    with stopwatch(device) as watch:
        watch.start()
        step()
        watch.lap()
        return watch.stop()[0]
