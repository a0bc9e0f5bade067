"""The memory that one whole training step really takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rotor_profiling.memory import CpuMeter, Phase, memory_meter
from rotor_profiling.storage import storage_bytes


def measured_peak(step: Callable[[], object], present: Iterable[torch.Tensor], device: torch.device) -> int:
    """The most bytes that `device` holds while `step` runs.

    On CUDA, all that the process has allocated. On the CPU, where nobody counts what is already there, the bytes of
    the tensors `present` (parameters, buffers, gradients, optimizer state, the batch) and what `step` adds to them.
    """
    return measured_phases(lambda mark: step(), present, device)[""].peak


def measured_phases(
    step: Callable[[Callable[[str], None]], object], present: Iterable[torch.Tensor], device: torch.device
) -> dict[str, Phase]:
    """The bytes that `device` holds in each phase of `step`, counted as `measured_peak` counts.

    `step` is called with a function of a name, which ends the phase before (the first has the name "") and begins the
    next.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
    else:
        before = storage_bytes(tensor for tensor in present if tensor.device == device)
    with memory_meter(device) as meter:
        step(meter.mark)
    return {
        name: Phase(before + phase.start, before + phase.peak, before + phase.end)
        for name, phase in meter.phases.items()
    }


def measured_curve(step: Callable[[], object], present: Iterable[torch.Tensor]) -> list[tuple[float, int]]:
    """The bytes that the CPU holds while `step` runs: (seconds since its first allocation, bytes from then on).

    Counted as `measured_peak` counts, which is the curve's highest point. The profiler that listens makes the step a
    little slower.
    """
    before = storage_bytes(tensor for tensor in present if tensor.device.type == "cpu")
    with CpuMeter() as meter:
        step()
    return [(seconds, before + held) for seconds, held in meter.curve]
