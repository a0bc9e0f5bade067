"""How large a batch: the best one beside the largest without recomputation and the largest that fits.

    python benchmarks/batch.py                       # on the CPU; prints the table
    python benchmarks/batch.py --write               # also into docs/benchmarks.md and benchmarks/results/
    python benchmarks/batch.py --only llama --write  # rows of other networks stay

For each network there is one limit: what storing everything takes with a small batch. `best_batch` chooses inside it,
with the optimizer's step counted. Then whole steps are trained, of all three batches in turns: forward, loss, backward,
the optimizer's step, and clearing gradients. Samples a second are those of the median turn. On the CPU they are counted
in processor time of one thread, so that a busy machine does not matter. The largest batch without recomputation is
trained twice: by a plan that stores everything, and as the plain model, whose peak may be a little over the limit where
the model is captured.

The networks are such that a step costs much whatever the batch is: many weights for little work on each sample (small
images, short texts), and Adam, which reads and writes four numbers for every weight. Where a sample is much work for
few weights, samples a second hardly grow with the batch on a CPU, and the best batch recomputes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from report import merged, write
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, PlannedBatch, best_batch, format_bytes, models
from rotor_solver import store_all


@dataclass(frozen=True)
class Case:
    """A network, its samples, its loss, and the batch whose plain step is the limit."""

    make: Callable[[], nn.Module]
    sample_of: Callable[[int, torch.device], Any]
    loss: Callable[[Any], torch.Tensor]
    batch_of_the_limit: int


def images(batch: int, device: torch.device) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, device=device)


def texts(batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    words = torch.randint(1000, (batch, 16), device=device)
    return {"input_ids": words, "labels": words}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_key_value_heads=6, **sizes))


CASES = {
    "ResNet-50, 32×32 images": Case(
        lambda: models.resnet50(num_classes=10), images, lambda output: output.square().mean(), 24
    ),
    "Llama, 6 blocks of width 384, 16 words": Case(llama, texts, lambda output: output.loss, 8),
}


PLAIN = "largest without recomputation, plain model"


class Trainee:
    """A network that trains whole steps on one batch."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, sample: Any, case: Case) -> None:
        self.network, self.optimizer, self.sample, self.case = network, optimizer, sample, case

    def step(self) -> None:
        sample = self.sample
        output = self.network(**sample) if isinstance(sample, dict) else self.network(sample)
        self.case.loss(output).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def seconds(self, device: torch.device) -> float:
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        synchronize(device)
        begin = clock()
        self.step()
        synchronize(device)
        return clock() - begin

    def peak(self, device: torch.device) -> int:
        state = tensors_in([list(entry.values()) for entry in self.optimizer.state.values()])
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        model = [*self.network.parameters(), *self.network.buffers(), *gradients]
        present = [*model, *state, *tensors_in(self.sample)]
        return measured_peak(self.step, present, device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(name: str, case: Case, device: torch.device, turns: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    network = case.make().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    options: dict[str, Any] = {"loss": case.loss, "optimizer": optimizer, "fresh_grads": False}

    def sample_of(batch: int) -> Any:
        return case.sample_of(batch, device)

    plain = Checkpointable(network, sample_of(case.batch_of_the_limit), **options)
    assert plain.budget is not None
    limit = plain.budget.peak_bytes(store_all(plain.budget.chain))
    begin = time.process_time()
    chosen = best_batch(network, sample_of, limit, **options)
    seconds = time.process_time() - begin
    print(f"{name}: {chosen} (chosen in {seconds:.0f} s of processor time)", flush=True)
    assert chosen.largest_stored is not None
    batches = {
        "largest without recomputation": chosen.largest_stored,
        "largest that fits": chosen.largest,
        "best": chosen.batch,
    }
    trained: dict[str, nn.Module] = {PLAIN: network}
    for what, batch in batches.items():
        same = next((trained[other] for other in trained if batches.get(other) == batch), None)
        trained[what] = same or Checkpointable(network, sample_of(batch), mem_limit=limit, watch=False, **options)
    batches[PLAIN] = chosen.largest_stored
    trainees = {each: Trainee(each, optimizer, sample_of(batches[what]), case) for what, each in trained.items()}
    peaks = {}
    for each, trainee in trainees.items():
        trainee.step()
        peaks[each] = trainee.peak(device)
    times: dict[nn.Module, list[float]] = {each: [] for each in trainees}
    for _ in range(turns):
        for each, trainee in trainees.items():
            times[each].append(trainee.seconds(device))
    return [
        row(name, what, batches[what], chosen, batches[what] / statistics.median(times[each]), peaks[each])
        for what, each in trained.items()
    ]


def row(name: str, what: str, batch: int, chosen: PlannedBatch, rate: float, peak: int) -> dict[str, Any]:
    return {
        "network": name,
        "choice": what,
        "batch": batch,
        "limit_bytes": chosen.mem_limit,
        "measured_peak_bytes": peak,
        "predicted_per_second": chosen.point(batch).samples_per_second,
        "measured_per_second": rate,
        "measured_batches": sum(point.measured for point in chosen.points),
        "gap": chosen.gap,
        "inside_limit": what == PLAIN or peak <= chosen.mem_limit,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| network | limit | which batch | batch | peak | samples a second |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in rows:
        lines.append(
            f"| {each['network']} | {format_bytes(each['limit_bytes'])} | {each['choice']} | {each['batch']} "
            f"| {format_bytes(each['measured_peak_bytes'])} | {each['measured_per_second']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", help="part of a network's name")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, case in CASES.items():
        if options.only is None or options.only.lower() in name.lower():
            rows += run(name, case, device, options.turns)
    print(table(rows))
    if options.write:
        everything = merged("batch", rows, device, CASES, key="network")
        write("batch", table(everything), everything, device)
    if not all(each["inside_limit"] for each in rows):
        raise SystemExit("a measured peak is over its limit")


if __name__ == "__main__":
    main()
