"""Measure a device of this machine: as a `Device`, and as text of a file that `device_from_file` reads.

The rate of a dtype is that of its fastest measured matrix product, and the bandwidth that of a copy. Efficiencies are
the shares of rate and bandwidth that typical kernels reach.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F

from rotor_profiling.backends import stopwatch
from rotor_profiling.isolate import undoing
from rotor_profiling.timing import seconds_of
from rotor_py.data_sheet import CONTEXT_BYTES, Device, Efficiencies, Rates

_LAUNCHES = 200  # number of small additions in a row, whose mean time counts as the time of a kernel launch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of measured operators: large enough for the peak rates of kernels, small enough to take seconds."""

    matrices: tuple[tuple[int, int, int], ...]  # (rows, inner dimension, columns) of each matrix product
    attention: tuple[int, int, int, int]  # (batch, heads, tokens, width of a head)
    convolution: tuple[int, int, int]  # (batch, channels, pixels of a side)
    copied_bytes: int


_ON_CUDA = Sizes(
    # A square product, two products of a transformer of width 4096, and a product with a narrow inner dimension.
    matrices=((8192, 8192, 8192), (8192, 4096, 4096), (8192, 4096, 14_336), (16_384, 1024, 1024)),
    attention=(4, 16, 4096, 128),
    convolution=(64, 128, 56),
    copied_bytes=2**30,
)
_ON_CPU = Sizes(
    matrices=((1024, 1024, 1024), (2048, 512, 512), (2048, 512, 1792)),
    attention=(1, 8, 512, 64),
    convolution=(8, 64, 28),
    copied_bytes=2**27,
)


def calibrate(
    device: torch.device,
    memory_bytes: int,
    *,
    sizes: Sizes | None = None,
    progress: Callable[[str], None] | None = None,
) -> Device:
    """Measure `device`, in ten to thirty seconds. Calls `progress` with the name of each measurement before it."""
    sizes = sizes or (_ON_CUDA if device.type == "cuda" else _ON_CPU)
    say = progress or (lambda text: None)
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []), torch.no_grad():
        say("matrix products")
        with _tf32(allowed=False):
            found = {"fp32": _products(device, sizes, torch.float32)}
        with _tf32(allowed=True):
            found["tf32"] = _products(device, sizes, torch.float32) if cuda else found["fp32"]
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            try:
                found[name] = _products(device, sizes, dtype)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # some devices have no matrix products in this dtype
                found[name] = found["fp32"]
        rates = Rates(**{name: _rounded(max(each)) for name, each in found.items()})
        dtype = torch.bfloat16 if cuda and rates.bf16 > rates.fp32 else torch.float32
        best = rates.of(dtype, tf32=False)
        products = found["bf16" if dtype is torch.bfloat16 else "fp32"]
        say("attention")
        forward, backward = _attention(device, sizes, dtype)
        say("a convolution")
        batch, channels, side = sizes.convolution
        pictures = torch.randn(batch, channels, side, side, device=device, dtype=dtype)
        weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype)
        operations = 2 * batch * side * side * channels * channels * 9
        convolved = operations / _seconds(lambda: F.conv2d(pictures, weight, padding=1), device)
        say("copies")
        bandwidth, streamed = map(_rounded, _streams(device, sizes))
        pcie = bandwidth
        if cuda:
            there = torch.empty(min(sizes.copied_bytes, 2**28), dtype=torch.uint8, device=device)
            here = torch.empty(there.numel(), dtype=torch.uint8).pin_memory()
            pcie = _rounded(there.numel() / _seconds(lambda: there.copy_(here, non_blocking=True), device))
        small = torch.zeros(1, device=device)
        launch = _rounded(_seconds(lambda: [small.add_(1.0) for _ in range(_LAUNCHES)], device) / _LAUNCHES)
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        rates=rates,
        compute_capability=torch.cuda.get_device_capability(device) if cuda else (0, 0),
        link_bandwidth=pcie,
        pcie_bandwidth=pcie,
        efficiencies=Efficiencies(
            matmul=_rounded(min(1.0, statistics.median(products) / best)),
            convolution=_rounded(convolved / best),
            attention=_rounded(forward / best),
            attention_backward=_rounded(backward / best),
            streaming=_rounded(min(1.0, streamed / bandwidth)),
            anchor=f"measured on this {name} with torch {torch.__version__}",
        ),
        context_bytes=CONTEXT_BYTES if cuda else 0,
        launch_seconds=launch,
        vendor="cpu" if not cuda else "amd" if torch.version.hip else "nvidia",
    )


def _products(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> list[float]:
    found = []
    for rows, inner, columns in sizes.matrices:
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(inner, columns, device=device).to(dtype)
        found.append(2 * rows * inner * columns / _seconds(partial(torch.matmul, left, right), device))
    return found


def _attention(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> tuple[float, float]:
    """Return floating point operations per second of the forward, and of the backward, of causal attention."""
    batch, heads, length, width = sizes.attention
    query, key, value = (
        torch.randn(batch, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    products = batch * heads * length * length * width  # FLOPs of one product: the mask leaves half of them
    forward = _seconds(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), device)
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradient = torch.randn_like(out)
    backward = _seconds(lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True), device)
    return 2 * products / forward, 5 * products / backward


def _streams(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Return the bytes per second that a copy reads and writes, and the median rate of four other operators."""
    count = sizes.copied_bytes // 4
    one, other = torch.randn(count, device=device), torch.empty(count, device=device)
    rows = one.view(-1, 1024)
    others: list[Callable[[], object]] = [
        lambda: torch.add(one, 1.0),
        lambda: F.gelu(one),
        lambda: F.layer_norm(rows, (1024,)),
        lambda: F.softmax(rows, -1),
    ]
    moved = 2 * 4 * count  # one read, one write
    copied = moved / _seconds(lambda: other.copy_(one), device)
    return copied, statistics.median(moved / _seconds(each, device) for each in others)


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call of `run`, after two in which libraries choose algorithms and reserve memory."""
    run()
    run()
    with stopwatch(device) as watch:
        return max(seconds_of(run, watch), 1e-9)


@contextmanager
def _tf32(*, allowed: bool) -> Iterator[None]:
    with undoing() as undo:
        undo.append(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        yield


_HEAD = """\
# For rotor-plan --device-file. Bandwidths are bytes a second, rates floating point operations a second.
# link, the bandwidth between two devices, is not measured: its value is that of PCIe.
"""


def as_toml(key: str, device: Device) -> str:
    cells: dict[str, object] = {
        "name": device.name,
        "vendor": device.vendor,
        "memory": device.memory_bytes,
        "context": device.context_bytes,
        "bandwidth": device.bandwidth,
        **asdict(device.rates),
        "compute_capability": ".".join(map(str, device.compute_capability)),
        "link": device.link_bandwidth,
        "pcie": device.pcie_bandwidth,
        "launch_seconds": device.launch_seconds,
    }
    # JSON numbers and strings are valid TOML, escaped quotes included.
    tables = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in each.items() if value is not None)
        for name, each in ((key, cells), (f"{key}.efficiencies", asdict(device.efficiencies)))
    ]
    return "\n".join((_HEAD, *tables))
