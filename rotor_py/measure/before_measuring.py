"""What cannot fit, said before anything is run: what a step holds whatever the plan is may be more than the limit.

People come here because the step does not fit. Measuring a large model takes a while, and runs out of memory itself
where parameters and optimizer state alone are too much. These are known without it, to the byte.

A chain of tensors without memory would show more, and is not asked: its least limit could refuse what fits. What it
promises is a bound from above, and some steps take a sixth less; what libraries hold beside tensors is assumed; and
ways to store a stage that show in values, or in compiled code, are missing.
"""

from __future__ import annotations

import torch
from torch import nn

from rotor_profiling import OptimizerCost
from rotor_py.measure.fixed_memory import FixedMemory, known_memory, trained_bytes
from rotor_py.measure.stepped_parameters import NONE_STEPPED, SteppedParameters
from rotor_py.units import format_bytes
from rotor_solver import InfeasibleError


def refusal_before_measuring(
    model: nn.Module,
    sample: object,
    device: torch.device,
    mem_limit: int,
    *,
    fresh_gradients: bool,
    optimizer: OptimizerCost | None,
    stepped: SteppedParameters = NONE_STEPPED,
) -> InfeasibleError | None:
    """The error for a step of `model` on `sample` that `mem_limit` bytes cannot hold; None if they may.

    It is certain, since what stages keep is not counted. For the same reason its `min_bytes` are a bound.
    """
    known = known_memory(model, sample, device, fresh_gradients=fresh_gradients, optimizer=optimizer, stepped=stepped)
    # Where gradients are freed between steps, all of them are there when the optimizer steps. The batch may be gone.
    fresh = trained_bytes(model, device, stepped) if fresh_gradients else 0
    stepping = known.total - known.batch + fresh
    least = max(known.total, stepping)
    if least <= mem_limit:
        return None
    beside = f", and {format_bytes(fresh)} gradients when the optimizer steps" if stepping > known.total else ""
    needs = ""
    # Freed between steps, all of them are there again when the optimizer steps.
    freed = max(known.total - known.gradients, known.total - known.batch)
    if known.gradients and freed <= mem_limit:
        needs = (
            " If your loop frees gradients between steps (optimizer.zero_grad()), say so: with fresh_grads=True "
            f"(--fresh-grads) these are {format_bytes(freed)} ({freed} bytes)."
        )
    message = (
        f"before measuring: a training step needs at least {format_bytes(least)} ({least} bytes), for "
        f"{known.in_words()}{beside}; the limit is {format_bytes(mem_limit)} ({mem_limit} bytes), so whatever is "
        f"recomputed, it would run out of memory.{needs} Try {_remedies(known, least - mem_limit)}."
    )
    return InfeasibleError(message, min_bytes=least, mem_limit=mem_limit, kind="limit_below_held")


def _remedies(known: FixedMemory, missing: int) -> str:
    batch = "a smaller batch, " if known.batch > missing else ""
    state = "an optimizer with less state, " if known.optimizer else ""
    return f"{batch}{state}parameters in bfloat16, fully_shard over several devices, or a larger limit"
