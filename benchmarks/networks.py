"""Real networks inside a limit: predicted and measured peak, overhead, and equality with plain training.

    python benchmarks/networks.py                       # on the CPU; prints the table
    python benchmarks/networks.py --device cuda --batch 64 --image 224
    python benchmarks/networks.py --write               # also into the README and benchmarks/results/

Per network, three limits a quarter, half and three quarters of the way from the least possible to storing everything.
Three SGD steps with momentum are taken with the plan and without it, from the same weights; outputs,
gradients, parameters and buffers are compared bit for bit after each. The peak is that of whole steps, the optimizer's
included. Overhead is the median time of planned steps over that of plain steps, taken in turns in the same run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from clock import seconds_of
from report import merged, write
from torch import nn

from rotor_profiling import measured_peak, storage_bytes, tensors_in
from rotor_py import Checkpointable, format_bytes, models
from rotor_solver import simulate, store_all

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": models.resnet18,
    "ResNet-50": models.resnet50,
    "VGG-16": models.vgg16_bn,
    "DenseNet-121": models.densenet121,
    "Inception v3": lambda: models.inception_v3(aux_logits=False),
}
LEAST_IMAGE = {"Inception v3": 96, "VGG-16": 128}
"""Inception v3 cannot do with less; of VGG-16 on smaller images, next to everything is parameters."""
SHARES = (0.25, 0.5, 0.75)


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


class Trainee:
    """A network with its optimizer and a fixed batch."""

    def __init__(self, network: nn.Module, batch: torch.Tensor, labels: torch.Tensor) -> None:
        self.network, self.batch, self.labels = network, batch, labels
        self.optimizer = make_optimizer(network)

    def step(self) -> torch.Tensor:
        output = self.network(self.batch)
        nn.functional.cross_entropy(output, self.labels).backward()
        self.optimizer.step()
        return output.detach()

    def measured_step(self) -> tuple[int, torch.Tensor]:
        """The peak of a step that starts without gradients, and its output."""
        self.optimizer.zero_grad()
        state = tensors_in([list(entry.values()) for entry in self.optimizer.state.values()])
        present = [*self.network.parameters(), *self.network.buffers(), *state, self.batch]
        outputs: list[torch.Tensor] = []
        others = allocated_beside(present, self.batch.device)
        peak = measured_peak(lambda: outputs.append(self.step()), present, self.batch.device)
        return peak - others, outputs[0]

    def seconds(self) -> float:
        self.optimizer.zero_grad()
        return seconds_of(self.step, self.batch.device)

    def state(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        return [*self.network.parameters(), *gradients, *self.network.buffers()]


def largest_difference(a: Trainee, b: Trainee) -> float:
    pairs = zip(a.state(), b.state(), strict=True)
    return max(0.0 if torch.equal(x, y) else (x.double() - y.double()).abs().max().item() for x, y in pairs)


def run(
    name: str, make: Callable[[], nn.Module], device: torch.device, batch: int, image: int, repeats: int
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    size = max(image, LEAST_IMAGE.get(name, 0))
    network = make().to(device)
    inputs = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    planned = Checkpointable(
        copy.deepcopy(network),
        loss=lambda output: nn.functional.cross_entropy(output, labels),
        optimizer=make_optimizer(network),
        fresh_grads=True,
    )
    planned.measure(inputs)
    budget = planned.budget
    assert budget is not None
    other = budget.fixed.other if device.type == "cuda" else 0
    least, full = budget.least_bytes() - other, budget.peak_bytes(store_all(budget.chain)) - other
    start = {name: tensor.cpu().clone() for name, tensor in network.state_dict().items()}
    rows = []
    for share in SHARES:
        limit = int(least + (full - least) * share)
        planned.compute_sequence(limit + other)
        assert planned.sequence is not None
        pair = [Trainee(planned, inputs, labels), Trainee(network, inputs, labels)]
        for trainee in pair:
            trainee.network.load_state_dict(start)
        peaks, difference = [], 0.0
        for step in range(3):
            torch.manual_seed(step)
            peak, output = pair[0].measured_step()
            torch.manual_seed(step)
            _, expected = pair[1].measured_step()
            if step:  # the first step has no optimizer state yet
                peaks.append(peak)
            difference = max(difference, largest_difference(*pair), (output - expected).abs().max().item())
        times = [(pair[0].seconds(), pair[1].seconds()) for _ in range(repeats)]
        predicted = budget.peak_bytes(planned.sequence) - other
        measured = max(peaks)
        rows.append(
            {
                "network": name,
                "input": [batch, 3, size, size],
                "stages": len(budget.chain),
                "least_bytes": least,
                "store_all_bytes": full,
                "limit_bytes": limit,
                "predicted_bytes": predicted,
                "measured_bytes": measured,
                "predicted_overhead": simulate(budget.chain, planned.sequence).makespan
                / simulate(budget.chain, store_all(budget.chain)).makespan,
                "measured_overhead": statistics.median(a for a, _ in times) / statistics.median(b for _, b in times),
                "largest_difference": difference,
                "inside_limit": measured <= limit,
            }
        )
        del pair
    return rows


def allocated_beside(present: list[torch.Tensor], device: torch.device) -> int:
    """What the process holds on a CUDA device beside one network, which `measured_peak` counts: the other network."""
    return torch.cuda.memory_allocated(device) - storage_bytes(present) if device.type == "cuda" else 0


def table(rows: list[dict[str, Any]], *, times: bool = True) -> str:
    """With `times`, overhead as well; that of the README is measured by `overhead.py`."""
    columns = " time: predicted | time: measured |" if times else ""
    lines = [
        "| network | batch | least | store-all | limit | predicted | measured | measured / predicted "
        f"|{columns} largest difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |" + " --- | --- |" * times,
    ]
    for row in rows:
        sizes = [format_bytes(row[f"{key}_bytes"]) for key in ("least", "store_all", "limit", "predicted", "measured")]
        shape = "×".join(map(str, row["input"]))
        ratio = row["measured_bytes"] / row["predicted_bytes"]
        overhead = f" ×{row['predicted_overhead']:.2f} | ×{row['measured_overhead']:.2f} |" if times else ""
        lines.append(
            f"| {row['network']} | {shape} | {' | '.join(sizes)} | {ratio:.2%} "
            f"|{overhead} {row['largest_difference']:g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--image", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", help="part of a network's name")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[dict[str, Any]] = []
    for name, make in NETWORKS.items():
        if options.only is None or options.only.lower() in name.lower():
            rows += run(name, make, device, options.batch, options.image, options.repeats)
            print(table(rows[-len(SHARES) :]), flush=True)
    print(table(rows))
    if options.write:
        everything = merged("networks", rows, device, NETWORKS, "network")
        write("networks", table(everything, times=False), everything, device)
    if not all(row["inside_limit"] for row in rows):
        raise SystemExit("a measured peak is over its limit")


if __name__ == "__main__":
    main()
