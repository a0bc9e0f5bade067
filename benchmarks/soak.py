"""Does training stay what it is over thousands of steps? Live bytes, peaks and numbers, with batches of changing size.

    python benchmarks/soak.py [--steps 2000] [--write]

Trains a chain and a captured model from plans that recompute, with dropout, BatchNorm and AdamW, on batches no larger
than the planned one. Prints, for each, the limit and the largest peak measured, the bytes of live tensors at the first
and at the last sample, the most that a sampled step left behind, and whether weights, buffers and optimizer are those
of plain training, bit for bit. Exits with 1 if a peak is over the limit, if bytes grow, or if anything differs. The
resident size of the process is printed for information. With --write, the rows go into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor_profiling import memory_meter, storage_bytes, tensors_in
from rotor_py import Checkpointable, format_bytes, store_all

CPU = torch.device("cpu")
BATCH, WIDTH, SIZE = 16, 16, 12
SHARE = 0.3
"""How far the limit lies on the way from the least possible to storing everything."""


class Residual(nn.Module):
    """Captured: a convolutional network with a skip connection in every block."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.entry = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(_block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.entry(value)
        for block in self.blocks:
            value = value + block(value)
        return self.head(nn.functional.dropout(value.mean((2, 3)), 0.1, self.training))


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Dropout(0.1))


def chain(depth: int = 4) -> nn.Sequential:
    layers = [nn.Conv2d(3, WIDTH, 3, padding=1), *(_block() for _ in range(depth))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": Residual}


@dataclass(frozen=True, slots=True)
class Soak:
    """What was found of one model. Bytes; `kept_bytes` is the most that a sampled step left allocated."""

    model: str
    steps: int
    samples: int
    limit_bytes: int
    peak_bytes: int
    live_bytes_first: int
    live_bytes_last: int
    live_bytes_most: int
    kept_bytes: int
    different: int
    resident_bytes_first: int
    resident_bytes_last: int

    def problems(self) -> list[str]:
        """What does not hold, in words; empty if all does."""
        found = []
        if self.peak_bytes > self.limit_bytes:
            found.append(f"{self.model}: a peak of {self.peak_bytes} bytes is over the limit of {self.limit_bytes}")
        if self.kept_bytes:
            found.append(f"{self.model}: a step left {self.kept_bytes} bytes behind")
        if not self.live_bytes_first == self.live_bytes_last == self.live_bytes_most:
            found.append(f"{self.model}: live bytes went from {self.live_bytes_first} to {self.live_bytes_last}")
        if self.different:
            found.append(f"{self.model}: {self.different} tensors are not those of plain training")
        return found


def soak(name: str, steps: int, every: int) -> Soak:
    """Train the model `name` for `steps` steps, looking closely at one step of `every`, and then its plain twin."""
    gc.collect()
    gc.freeze()  # what is there already is neither looked through at every sample nor counted
    try:
        return _soak(name, steps, every)
    finally:
        gc.unfreeze()


def _soak(name: str, steps: int, every: int) -> Soak:
    torch.manual_seed(0)
    plain = MODELS[name]()
    model = planned(copy.deepcopy(plain))
    limit = model.plan().mem_limit
    peaks: list[int] = []
    kept: list[int] = []
    live: list[int] = []
    resident: list[int] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, step in enumerate(_steps(model, optimizer, steps)):
        if number % every or number < 2 * every:  # shapes of all kinds were seen by then, and the optimizer has a state
            step()
            continue
        gc.collect()
        live.append(live_bytes())
        resident.append(resident_bytes())
        before = storage_bytes([*model.parameters(), *model.buffers(), *tensors_in(optimizer.state_dict()["state"])])
        with memory_meter(CPU) as meter:
            step()
            model.zero_grad()
        peaks.append(before + meter.phases[""].peak)
        kept.append(meter.phases[""].end)
    twin = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in _steps(plain, twin, steps):
        step()
    pairs = zip(_state(model, optimizer), _state(plain, twin), strict=True)
    return Soak(
        model=name,
        steps=steps,
        samples=len(peaks),
        limit_bytes=limit,
        peak_bytes=max(peaks),
        live_bytes_first=live[0],
        live_bytes_last=live[-1],
        live_bytes_most=max(live),
        kept_bytes=max(kept),
        different=sum(not torch.equal(a, b) for a, b in pairs),
        resident_bytes_first=resident[0],
        resident_bytes_last=resident[-1],
    )


def planned(model: nn.Module) -> Checkpointable:
    """`model`, planned for the largest batch and a limit at which some of it is recomputed."""
    optimizer = torch.optim.AdamW(model.parameters())
    whole = Checkpointable(model, loss=_loss, optimizer=optimizer, fresh_grads=True)
    whole.measure(_batch(0, BATCH))
    assert whole.budget is not None
    least, most = whole.budget.least_bytes(), whole.budget.peak_bytes(store_all(whole.budget.chain))
    whole.compute_sequence(int(least + SHARE * (most - least)))
    return whole


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> Iterator[Callable[[], None]]:
    """The steps of a training run; the batch is made inside, so that it is among what a step allocates."""
    torch.manual_seed(1)
    sizes = torch.randint(2, BATCH + 1, (count,), generator=torch.Generator().manual_seed(2)).tolist()
    for number in range(count):
        size = sizes[number] if number % 3 else BATCH

        def step(number: int = number, size: int = size) -> None:
            output = model(_batch(number, size))
            _loss(output).backward()
            optimizer.step()

        yield step
        model.zero_grad()


def _batch(number: int, size: int) -> torch.Tensor:
    return torch.randn(size, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(number))


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), *tensors_in(optimizer.state_dict()["state"])]


def live_bytes() -> int:
    """Bytes behind all tensors that Python knows of and that are not frozen."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return storage_bytes(t for t in tensors if t.device == CPU and t.layout == torch.strided and not _fake(t))


def _fake(tensor: torch.Tensor) -> bool:
    """Without memory: what TorchDynamo traces with."""
    return type(tensor) not in (torch.Tensor, nn.Parameter)


def resident_bytes() -> int:
    """The resident size of this process; 0 where /proc is not there to say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def table(found: list[Soak]) -> str:
    lines = [
        "| model | steps | limit | largest peak of samples | live tensors, first and last sample | left by a step "
        "| tensors that differ | resident |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in found:
        live = f"{format_bytes(each.live_bytes_first)}, {format_bytes(each.live_bytes_last)}"
        resident = f"{format_bytes(each.resident_bytes_first)}, {format_bytes(each.resident_bytes_last)}"
        lines.append(
            f"| {each.model} | {each.steps} | {format_bytes(each.limit_bytes)} | {format_bytes(each.peak_bytes)} "
            f"({each.samples}) | {live} | {each.kept_bytes} | {each.different} | {resident} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = [soak(name, options.steps, max(2, options.steps // 100)) for name in MODELS]
    print(table(found))
    problems = [problem for each in found for problem in each.problems()]
    if options.write and not problems:
        from report import write

        rows: list[dict[str, Any]] = [asdict(each) for each in found]
        write("soak", table(found), rows, CPU)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
