"""The instruments that predict for a device of the table."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from rotor_profiling.predicted.predicted_device import Numbered, PredictedDevice
from rotor_py.devices.device import Device
from rotor_py.devices.roofline import Roofline
from rotor_py.devices.scratch import scratch_bytes, workspace_bytes
from rotor_py.predict.operators.cuda_operators import cuda_operators

_BLOCK = 512
"""Bytes that the caching allocator rounds up to a multiple of (`kMinBlockSize` in torch), on ROCm as well."""


def prediction_for(device: Device) -> PredictedDevice:
    """What predicts for `device`: its allocator's rounding, a roofline for a clock, the operators that run there."""
    return PredictedDevice(
        kind="cuda",
        name=device.name,
        memory_bytes=device.usable_bytes,
        seconds=Roofline(device),
        scratch=scratch_bytes,
        workspace_bytes=workspace_bytes(device),
        storages=Numbered(_BLOCK),
        chosen=nullcontext if device.vendor == "cpu" else partial(cuda_operators, device.compute_capability),
    )
