"""What numbers rest on that are for a device that is not there: exact, predicted or assumed, and never measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from rotor_py.data_sheet import Device, Devices, workspace_bytes
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import Measurement
from rotor_py.units import format_bytes, format_seconds

_ANCHORED = 1.25
"""How far seconds may be off where efficiencies were fitted to known times, as a factor. A guess: half as much again as
the largest typical error of steps that they were not fitted to, 7 to 17 % (docs/devices.md)."""
_GUESSED = 1.6
"""The same where they were not. A guess: between devices of known times, efficiencies differ by about as much."""

_NAMED = 3
"""Layers that a sentence names."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What is exact, predicted and assumed of a step on `devices`, which need not be there.

    `recurrent` names the layers that other operators run there, so that nothing is exact of them.
    """

    devices: Devices
    fixed: FixedMemory
    batch_bytes: int
    measurement: Measurement
    recurrent: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        """One of the devices, which are alike."""
        return self.devices.each

    def seconds(self, seconds: float) -> tuple[float, float]:
        """The least and the most that predicted seconds may really be."""
        factor = _GUESSED if self.device.efficiencies.anchor is None else _ANCHORED
        return seconds / factor, seconds * factor

    def range(self, seconds: float) -> str:
        """The same in words."""
        least, most = self.seconds(seconds)
        return f"{format_seconds(least)} to {format_seconds(most)}"

    @property
    def anchor(self) -> str:
        """What the seconds were fitted to, or that it is nothing."""
        return self.device.efficiencies.origin

    def sentences(self) -> tuple[str, ...]:
        """What is exact, what is predicted and what is assumed, a sentence for each."""
        return (
            "Nothing was measured. Exact: parameters, gradients, optimizer state, the batch, and what stages return "
            "and keep.",
            *self._inexact,
            "Predicted: peaks, what the allocator reserves, and what kernels need beside that while they run"
            f"{self._predicted_beside}.",
            f"Assumed: {', '.join(self._assumed)}, and batches without padding{self._assumed_beside}.",
        )

    @property
    def _inexact(self) -> tuple[str, ...]:
        found = self.recurrent
        if not found:
            return ()
        first, more = ", ".join(found[:_NAMED]), len(found) - _NAMED
        named = f"{first} and {more} more" if more > 0 else first
        return (
            f"Warning: that is not so of the recurrent layers ({named}): they were planned with operators of the CPU, "
            f"and {'MIOpen' if self.device.vendor == 'amd' else 'cuDNN'} keeps other bytes for their backward, and "
            "takes another time.",
        )

    @property
    def _stand_in(self) -> str:
        if self.device.rates_of is None:
            return ""
        return (
            f"the rates, the bandwidths and the kernels of {self.device.rates_of}, since only the memory of this "
            "device is known; "
        )

    @property
    def _assumed(self) -> tuple[str, ...]:
        rates = f"{self._stand_in}the parts of the data sheet's rates that kernels reach ({self.anchor})"
        if self.device.vendor == "cpu":
            return rates, self._kernels
        workspace, context = workspace_bytes(self.device), self.device.context_bytes
        return (
            rates,
            self._kernels,
            f"{format_bytes(workspace)} for {self._library}",
            f"{format_bytes(context)} for the driver's context beside the limit",
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

    @property
    def _library(self) -> str:
        return "hipBLAS" if self.device.vendor == "amd" else "cuBLAS"

    @property
    def _predicted_beside(self) -> str:
        return "" if self.devices.count == 1 else "; parameters that are whole, and gradients on their way"

    @property
    def _assumed_beside(self) -> str:
        return "" if self.devices.count == 1 else "; what devices send to each other is sent while they compute"

    def as_data(self, peaks: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
        """The same by kind, in bytes and seconds; seconds as the least and the most."""
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
