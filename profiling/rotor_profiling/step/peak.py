"""The memory that one whole training step really takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rotor_profiling.instruments import memory_meter
from rotor_profiling.memory import CpuMeter, Phase
from rotor_profiling.storage import storage_bytes


def measured_peak(step: Callable[[], object], present: Iterable[torch.Tensor], device: torch.device) -> int:
    """The most bytes that `device` holds while `step` runs.

    On CUDA, that is all that the process has allocated. On the CPU, nobody counts what is already there; so it is the
    bytes of the tensors `present` (parameters, buffers, gradients, optimizer state, the batch) and what `step` adds.
    ValueError for a kind of device whose allocator cannot be read.
    """
    return measured_phases(lambda mark: step(), present, device)[""].peak


def measured_phases(
    step: Callable[[Callable[[str], None]], object], present: Iterable[torch.Tensor], device: torch.device
) -> dict[str, Phase]:
    """The bytes that `device` holds in each phase of `step`, counted as `measured_peak` counts.

    `step` gets a function that begins the phase of a given name and ends the one before; the first phase is named "".
    ValueError for a kind of device whose allocator cannot be read.
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
    with CpuMeter() as meter:  # CUDA's allocator has counters, but tells no history
        step()
    return [(seconds, before + held) for seconds, held in meter.curve]
