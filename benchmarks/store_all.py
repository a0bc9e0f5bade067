"""Does storing everything cost more than plain training? Peak and time of both, in turns in one run.

    python benchmarks/store_all.py [--device cuda] [--write]

With --write, the table also goes into the README and benchmarks/results/.

Prints the median time of a step with a store-all plan over the median time of a plain step (the aim is at most 1.02),
and both measured peaks.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from clock import seconds_of
from report import write
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, format_bytes, models


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    return {
        "ResNet-18": (models.resnet18(), (16, 3, 96, 96)),
        "24 × (Linear, ReLU)": (
            nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(24)]),
            (512, 512),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = []
    for name, (network, shape) in networks().items():
        network.to(device)
        batch = torch.randn(shape, device=device)
        planned = Checkpointable(network, mem_limit="99%")
        planned.measure(batch)
        planned.compute_sequence()

        def step(model: nn.Module, batch: torch.Tensor = batch) -> None:
            model(batch).square().mean().backward()

        def peak(model: nn.Module, batch: torch.Tensor = batch) -> int:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            present = [*model.parameters(), *model.buffers(), *gradients, batch]
            return measured_peak(lambda: step(model), present, device)

        for model in (network, planned) * 3:
            step(model)
        times = [
            [seconds_of(lambda m=model: step(m), device) for model in (planned, network)]
            for _ in range(options.repeats)
        ]
        ratio = statistics.median(a for a, _ in times) / statistics.median(b for _, b in times)
        rows.append(
            {"network": name, "plain_bytes": peak(network), "planned_bytes": peak(planned), "time_ratio": ratio}
        )
    print(table(rows))
    if options.write:
        write("store-all", table(rows), rows, device)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| network | plain peak | store-all peak | time, store-all / plain |", "| --- | --- | --- | --- |"]
    for row in rows:
        plain, planned = format_bytes(row["plain_bytes"]), format_bytes(row["planned_bytes"])
        lines.append(f"| {row['network']} | {plain} | {planned} | {row['time_ratio']:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
