"""Describe devices by the sizes and rates in their data sheets, and by the share of each rate that kernels reach."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rotor_py.errors import InvalidValueError
from rotor_py.units import exact_bytes, format_bytes, limit_text

if TYPE_CHECKING:
    import torch

# Bytes that driver, CUDA context and loaded kernels take outside PyTorch's allocator. Assumed: processes took 400 to
# 650 MiB, those with more kernels took more.
CONTEXT_BYTES = 520 * 2**20

LAUNCH_SECONDS = 4e-6  # Seconds that Python takes to launch a kernel. Assumed: eager mode takes 3 to 10 µs.

# Number of cuBLAS workspaces: one for the thread that runs forwards, one for the engine's thread that runs backwards.
WORKSPACES = 2
_SETTING = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True)
class Rates:
    """Floating-point operations per second that the data sheet gives for each dtype, without structured sparsity."""

    bf16: float
    fp16: float
    tf32: float
    fp32: float

    def of(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        match str(dtype).removeprefix("torch."):
            case "bfloat16":
                return self.bf16
            case "float32" | "complex64":
                return self.tf32 if tf32 else self.fp32
            case "float64" | "complex128":  # a guess: devices with units for float64 do half as many as in float32
                return self.fp32 / 2
        return self.fp16


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Assumed share of the data sheet's rate that each class of kernels reaches; `streaming`: of memory bandwidth.

    `anchor` names the published or measured times to which these shares were fitted. Without an anchor, the shares are
    a guess, or copied from the device that `taken_from` names.
    """

    matmul: float
    convolution: float
    attention: float
    attention_backward: float
    streaming: float
    anchor: str | None = None
    taken_from: str | None = None

    @property
    def origin(self) -> str:
        if self.anchor is not None:
            return self.anchor
        return "no anchor" if self.taken_from is None else f"no anchor: taken from {self.taken_from}"


# Shares for devices without an anchor: between those fitted for the H100 and those fitted for the A100.
UNANCHORED = Efficiencies(matmul=0.65, convolution=0.5, attention=0.3, attention_backward=0.22, streaming=0.5)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Bandwidths are in bytes per second; those of links count only the data that a device sends.

    `memory_bytes` is the total that PyTorch reports, which is less than advertised. `sources` pairs the name of each
    field, such as `rates.bf16`, with the source of its number. If only the memory is known, `rates_of` names the device
    whose rates, bandwidths and kernels are used instead.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    rates: Rates
    compute_capability: tuple[int, int]
    link_bandwidth: float
    pcie_bandwidth: float
    efficiencies: Efficiencies = UNANCHORED
    context_bytes: int = CONTEXT_BYTES
    launch_seconds: float = LAUNCH_SECONDS
    vendor: str = "nvidia"
    sources: tuple[tuple[str, str], ...] = ()
    rates_of: str | None = None

    def __post_init__(self) -> None:
        if self.usable_bytes <= 0:
            raise InvalidValueError(
                f"a device of {exact_bytes(self.memory_bytes)} has no room for tensors: the driver's context takes "
                f"{exact_bytes(self.context_bytes)}; give all memory of the device, such as 24GB",
                kind="no_room",
                memory_bytes=self.memory_bytes,
                context_bytes=self.context_bytes,
            )

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.context_bytes


@dataclass(frozen=True, slots=True)
class Devices:
    """`count` identical devices that train one model together."""

    each: Device
    count: int = 1

    @property
    def name(self) -> str:
        return self.each.name if self.count == 1 else f"{self.count} × {self.each.name}"


def workspace_bytes(device: Device) -> int:
    """Return the bytes that PyTorch allocates for cuBLAS at the first matrix products, and keeps; 0 on a CPU.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp. `parseChosenWorkspaceSize` gives the bytes of one workspace, and
    each of `WORKSPACES` threads has its own. On an H100 with torch 2.11, 64 MiB remain allocated after a trained
    transformer has been deleted.
    """
    if device.vendor == "cpu":
        return 0
    if device.vendor == "amd":
        each = 128 * 2**20 if device.compute_capability[0] == 9 else 32 * 2**20
    else:
        each = 32 * 2**20 if device.compute_capability[0] >= 9 else 2 * 4096 * 1024 + 8 * 16 * 1024
    return WORKSPACES * each


@dataclass(frozen=True, slots=True)
class Reservation:
    """Predicted peak of the bytes that the caching allocator reserves on `device`, where it can have `usable_bytes`.

    `reserved_bytes` is the peak with the allocator's defaults, `expandable_bytes` that with expandable segments.
    """

    device: str
    usable_bytes: int
    step_bytes: int  # peak bytes of the step's tensors alone; a plan's promised peak is at least as large
    reserved_bytes: int
    expandable_bytes: int
    # whether the step fits only because the allocator returns free segments to the driver when memory runs out
    gives_back: bool

    def at_least(self, size: int) -> Reservation:
        reserved, expandable = max(self.reserved_bytes, size), max(self.expandable_bytes, size)
        return replace(self, reserved_bytes=reserved, expandable_bytes=expandable)

    @property
    def missing_bytes(self) -> int:
        return max(0, self.reserved_bytes - self.usable_bytes)

    def warning(self, peak_bytes: int) -> str | None:
        """Return advice if a step, with `peak_bytes` planned, does not fit or `gives_back` memory; None otherwise."""
        if self.gives_back:
            return (
                f"Predicted: the allocator reserves all {format_bytes(self.usable_bytes)} of the device, and returns "
                f"free segments to reserve others, which takes time that is not counted; set {_SETTING} to avoid that."
            )
        if not self.missing_bytes:
            return None
        smaller = max(peak_bytes - self.missing_bytes, 1)
        other = f", or {_SETTING}, with which it fits" if self.expandable_bytes <= self.usable_bytes else ""
        return (
            f"Warning: the step is predicted to run out of memory although its tensors fit, since the allocator has to "
            f"reserve {format_bytes(self.reserved_bytes)} for them, and {self.device} has "
            f"{format_bytes(self.usable_bytes)}; try a limit of {limit_text(smaller)}{other}."
        )
