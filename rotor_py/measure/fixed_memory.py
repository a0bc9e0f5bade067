"""What of a step's memory is there whatever the plan: parameters, gradients, optimizer state, and the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from rotor_profiling import OptimizerCost, bytes_like, storage_bytes, storages, tensors_in
from rotor_profiling.backends import prediction
from rotor_py.measure.device import allocated_bytes, segments_expand
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stepped_parameters import NONE_STEPPED, SteppedParameters
from rotor_py.units import format_bytes
from rotor_solver import InfeasibleError

_UNSPLIT = 8 * 2**20
_WORDS = {"optimizer": "optimizer state"}
"""Parts whose name in texts is not that of their field."""


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """Bytes on the device that every plan has to live with, from the beginning of the step to its end.

    `communication` is the memory in which gradients are sent and sharded parameters gathered. `batch` is what the
    caller passes in, if layers run before the chain; otherwise the batch is the chain's a_0, and counted there. `other`
    is what else this process holds on the device, and what the step makes for the caller and keeps to its end.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    communication: int = 0
    batch: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def in_words(self) -> str:
        """The parts that are not zero, with their sizes; empty if all are."""
        sizes = {_WORDS.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size)


def known_memory(
    model: nn.Module,
    sample: object,
    device: torch.device,
    *,
    fresh_gradients: bool,
    optimizer: OptimizerCost | None,
    stepped: SteppedParameters = NONE_STEPPED,
) -> FixedMemory:
    """What is known of the fixed part of a step of `model` on `sample` before anything is measured, the batch with it.

    `optimizer` is None where nothing is known about it. Gradients of parameters that are `stepped` in the backward are
    not fixed.
    """
    parameters, buffers = storages(_on(device, model.parameters())), storages(_on(device, model.buffers()))
    return FixedMemory(
        parameters=sum(parameters.values()),
        # Some are views of parameters.
        buffers=sum(size for storage, size in buffers.items() if storage not in parameters),
        gradients=kept_gradient_bytes(model, device, fresh=fresh_gradients, stepped=stepped),
        optimizer=optimizer.state_bytes if optimizer else 0,
        # What goes into a captured graph are also buffers, such as the mask of an attention.
        batch=storage_bytes(_on(device, tensors_in(sample)), owned_elsewhere={**parameters, **buffers}),
    )


def count_fixed_memory(
    model: nn.Module,
    sample: object,
    measurement: Measurement,
    device: torch.device,
    *,
    fresh_gradients: bool,
    optimizer: OptimizerCost | None,
    communication: int,
    buckets: bool,
    stepped: SteppedParameters = NONE_STEPPED,
) -> FixedMemory:
    """Count what is fixed in a step of `model` on `sample`; `optimizer` is None where nothing is known about it.

    `buckets` says that `communication` is on the device already, as DistributedDataParallel's buckets are. Gradients of
    parameters that are `stepped` in the backward are not fixed.
    """
    known = known_memory(model, sample, device, fresh_gradients=fresh_gradients, optimizer=optimizer, stepped=stepped)
    accounted = known.parameters + known.buffers + known.batch + (communication if buckets else 0)
    return replace(
        known,
        communication=communication,
        batch=known.batch if measurement.prefix else 0,
        other=measurement.loss.kept_bytes
        + measurement.returned_bytes
        + unsplit_bytes(device, sum(stage.saved_bytes for stage in measurement.stages))
        + _unaccounted(device, list(model.parameters()), accounted, optimizer),
    )


def kept_gradient_bytes(
    model: nn.Module, device: torch.device, *, fresh: bool, stepped: SteppedParameters = NONE_STEPPED
) -> int:
    """Bytes of gradients that are there throughout the step: those that frozen parameters still have and, unless
    `fresh`, those of all trained parameters but the `stepped` ones.
    """
    # An optimizer's `zero_grad` clears the gradients of its own parameters, so those of frozen ones may stay for good.
    frozen = [p.grad for p in model.parameters() if p.grad is not None and not p.requires_grad]
    return storage_bytes(_on(device, frozen)) + (0 if fresh else trained_bytes(model, device, stepped))


def trained_bytes(model: nn.Module, device: torch.device, stepped: SteppedParameters = NONE_STEPPED) -> int:
    """Bytes of a gradient for every parameter that is trained on `device`, but those that are `stepped`."""
    return bytes_like(p for p in stepped.others(model.parameters()) if p.requires_grad and p.device == device)


def _on(device: torch.device, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.device == device]


def unsplit_bytes(device: torch.device, saved: int) -> int:
    """Room for what CUDA's allocator hands out beyond what is asked for, in a step whose stages save `saved` bytes.

    It cuts a free block only where more than 1 MiB is left (`should_split` in c10/cuda/CUDACachingAllocator.cpp), and
    counts the whole block; segments that expand have no such rest. Which blocks are free is not known beforehand. On an
    H100, steps of 27 to 41 GB took up to 3.5 MiB more than their stages: twice that is left, and a hundredth of what
    stages save where that is less.
    """
    if device.type != "cuda" or prediction() is not None or segments_expand(device):
        return 0
    return min(_UNSPLIT, saved // 100)


def _unaccounted(
    device: torch.device, parameters: list[nn.Parameter], accounted: int, optimizer: OptimizerCost | None
) -> int:
    """What the process holds on the device beyond what is `accounted` for; zero on the CPU, where it is unknown.

    Gradients and optimizer state that are there already are taken off: they are counted as a whole elsewhere. On a
    device that is predicted, it is what libraries are assumed to keep for themselves.
    """
    if (predicted := prediction()) is not None:
        return predicted.workspace_bytes
    allocated = allocated_bytes(device)
    if allocated is None:
        return 0
    present = storage_bytes(_on(device, [p.grad for p in parameters if p.grad is not None]))
    state = optimizer.present_bytes if optimizer else 0
    return max(0, allocated - accounted - present - state)


# What cannot fit, said before anything is run: what a step holds whatever the plan is may be more than the limit.
#
# People come here because the step does not fit. Measuring a large model takes a while, and runs out of memory itself
# where parameters and optimizer state alone are too much. These are known without it, to the byte.
#
# A chain of tensors without memory would show more, and is not asked: its least limit could refuse what fits. What it
# promises is a bound from above, and some steps take a sixth less; what libraries hold beside tensors is assumed; and
# ways to store a stage that show in values, or in compiled code, are missing.


def static_infeasibility(
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
