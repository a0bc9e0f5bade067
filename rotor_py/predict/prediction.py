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

_BOTH_WAYS = 0.8
"""The part of the data sheet's bandwidth that copies reach both ways at once: 51 of 64 GB/s were measured on PCI
Express 5 (https://github.com/NVIDIA/nvbandwidth/issues/53)."""


def prediction_for(device: Device, count: int = 1) -> PredictedDevice:
    """What predicts for `device`, one of `count`: its allocator's rounding, a roofline for a clock, the operators that
    run there.
    """
    return PredictedDevice(
        kind="cuda",
        name=device.name,
        count=count,
        host_bandwidth=_BOTH_WAYS * device.pcie_bandwidth,
        memory_bytes=device.usable_bytes,
        seconds=Roofline(device),
        scratch=scratch_bytes,
        workspace_bytes=workspace_bytes(device),
        storages=Numbered(_BLOCK),
        chosen=nullcontext if device.vendor == "cpu" else partial(cuda_operators, device.compute_capability),
    )
