"""Provenance of a plan for simulated devices: which numbers are exact, predicted or assumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from rotor_py.data_sheet import Device, Devices, workspace_bytes
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import Measurement
from rotor_py.units import format_bytes, format_seconds

_ANCHORED = 1.25
"""Error of predicted seconds, as a factor, if efficiencies were fitted to known times. A guess: half as much again as
the largest typical error of steps outside the fit, 7 to 17 % (docs/devices.md). Too low claims false precision.
"""
_GUESSED = 1.6
"""The same without a fit. A guess: the efficiencies of devices with known times differ by about as much."""

_NAMED = 3
"""Most layers that a sentence names."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Exact, predicted and assumed numbers of a step on simulated `devices`.

    `recurrent` names layers that run other operators on the device, so that no number is exact for them.
    """

    devices: Devices
    fixed: FixedMemory
    batch_bytes: int
    measurement: Measurement
    recurrent: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        return self.devices.each

    def seconds(self, seconds: float) -> tuple[float, float]:
        """Lower and upper bound of predicted seconds."""
        factor = _GUESSED if self.device.efficiencies.anchor is None else _ANCHORED
        return seconds / factor, seconds * factor

    def range(self, seconds: float) -> str:
        return " to ".join(map(format_seconds, self.seconds(seconds)))

    @property
    def anchor(self) -> str:
        """The measurement that the seconds were fitted to, in words."""
        return self.device.efficiencies.origin

    def sentences(self) -> tuple[str, ...]:
        """One sentence each for exact, predicted and assumed numbers."""
        device, several, amd = self.device, self.devices.count > 1, self.device.vendor == "amd"
        found = [
            "Nothing was measured. Exact: parameters, gradients, optimizer state, the batch, and what stages return "
            "and keep."
        ]
        if self.recurrent:
            first, more = ", ".join(self.recurrent[:_NAMED]), len(self.recurrent) - _NAMED
            found.append(
                f"Warning: that is not so of the recurrent layers ({first}{f' and {more} more' if more > 0 else ''}): "
                f"they were planned with operators of the CPU, and {'MIOpen' if amd else 'cuDNN'} keeps other bytes "
                "for their backward, and takes another time."
            )
        assumed = [f"the parts of the data sheet's rates that kernels reach ({self.anchor})", self._kernels]
        if device.rates_of is not None:
            assumed[0] = (
                f"the rates, the bandwidths and the kernels of {device.rates_of}, since only the memory of this device "
                f"is known; {assumed[0]}"
            )
        if device.vendor != "cpu":
            assumed += [
                f"{format_bytes(workspace_bytes(device))} for {'hipBLAS' if amd else 'cuBLAS'}",
                f"{format_bytes(device.context_bytes)} for the driver's context beside the limit",
            ]
        return (
            *found,
            "Predicted: peaks, what the allocator reserves, and what kernels need beside that while they run"
            f"{'; parameters that are whole, and gradients on their way' if several else ''}.",
            f"Assumed: {', '.join(assumed)}, and batches without padding"
            f"{'; what devices send to each other is sent while they compute' if several else ''}.",
        )

    @property
    def _kernels(self) -> str:
        if self.device.vendor == "cpu":
            return "attention by the CPU's kernel"
        version = ".".join(torch.__version__.split(".")[:2])
        capability = ".".join(map(str, self.device.compute_capability))
        chosen = f"attention by the kernel that torch {version} chooses for compute capability {capability}"
        if self.device.vendor != "amd":
            return chosen
        return f"{chosen} on CUDA, and that kernels of ROCm (AOTriton, MIOpen) keep and take as much as CUDA's"

    def as_data(self, peaks: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
        """The numbers by kind, in bytes and seconds; seconds as lower and upper bound."""
        fixed = asdict(self.fixed)
        exact = ("parameters", "buffers", "gradients", "optimizer")
        return {
            "device": self.device.name,
            "devices": self.devices.count,
            "compute_capability": list(self.device.compute_capability),
            "exact": {
                **{f"{name}_bytes": fixed[name] for name in exact},
                "batch_bytes": self.batch_bytes,
                "activation_bytes": sum(each.activation_bytes for each in self.measurement.stages),
                "saved_bytes": sum(each.saved_bytes for each in self.measurement.stages),
                "inexact_layers": list(self.recurrent),
            },
            "predicted": {**peaks, "communication_bytes": self.fixed.communication},
            "assumed": {
                **{name: list(self.seconds(value)) for name, value in seconds.items()},
                "rates_of": self.device.rates_of or self.device.name,
                "efficiencies": asdict(self.device.efficiencies),
                "attention_kernel": self._kernels,
                "padding": False,
                "link_bytes_per_second": self.device.link_bandwidth,
                "host_link_bytes_per_second": self.device.pcie_bandwidth,
                "communication_overlaps": self.devices.count > 1,
                "workspace_bytes": workspace_bytes(self.device),
                "context_bytes": self.device.context_bytes,
                "launch_seconds": self.device.launch_seconds,
            },
            "measured": {},
        }
