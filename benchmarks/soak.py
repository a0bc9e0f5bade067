"""Does training stay what it is over thousands of steps? Live bytes, peaks and numbers, with batches of changing size.

    python benchmarks/soak.py [--steps 2000] [--write] [file packed ...]

Trains a chain and a captured model from plans that recompute, with dropout, BatchNorm and AdamW, on batches no larger
than the planned one; and the captured one in other ways: moved to a file, packed, in bfloat16, and stepped in the
backward. Prints, for each, the limit and the largest peak measured, the bytes of live tensors at the first and at the
last sample, the most that a sampled step left behind, and whether weights, buffers and optimizer are those of plain
training, bit for bit; where numbers are rounded, whether they are finite. Exits with 1 if a peak is over the limit, if
bytes, open files or the file of moved activations grow, if anything differs, or if no stage is kept in the way that a
row is about. The resident size of the process is printed for information. With --write, the rows go into
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rotor_profiling import memory_meter, storage_bytes, tensors_in
from rotor_py import Checkpointable, format_bytes
from rotor_solver import Backward, ForwardEnable, Loss, Sequence, store_all

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


@dataclass(frozen=True, slots=True)
class Kind:
    """A row: what is trained, and how its plan keeps stages."""

    make: Callable[[], nn.Module] = Residual
    way: str = ""
    """the way in which every stage is kept that can be; by default, the best plan's"""
    options: dict[str, Any] = field(default_factory=dict)
    moves: bool = False
    stepped: bool = False
    """whether parameters are stepped in the backward"""

    @property
    def exact(self) -> bool:
        return "keep" not in self.options


MODELS: dict[str, Kind] = {
    "chain": Kind(chain),
    "captured": Kind(),
    "file": Kind(moves=True),
    "packed": Kind(way="packed"),
    "bf16": Kind(way="in bf16", options={"keep": "bf16"}),
    "stepped": Kind(stepped=True),
}


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
    kept_so: int
    """stages that are kept in the way that the row is about"""
    file_bytes_first: int
    file_bytes_last: int
    open_files_first: int
    open_files_last: int
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
        if not self.kept_so:
            found.append(f"{self.model}: no stage is kept in this way")
        if self.file_bytes_last != self.file_bytes_first:
            found.append(f"{self.model}: the file went from {self.file_bytes_first} to {self.file_bytes_last} bytes")
        if self.open_files_last > self.open_files_first:
            found.append(f"{self.model}: {self.open_files_first} files were open, and {self.open_files_last} are")
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
    kind = MODELS[name]
    torch.manual_seed(0)
    plain = kind.make()
    with tempfile.TemporaryDirectory(prefix="rotor") as folder:
        found, state = _trained(name, copy.deepcopy(plain), steps, every, folder)
        left = len(list(Path(folder).iterdir()))
    if not kind.exact:
        different = sum(not bool(each.isfinite().all()) for each in state)
    else:
        twin = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        for step in _steps(plain, twin, steps):
            step()
        pairs = zip(state, _state(plain, twin), strict=True)
        different = sum(not torch.equal(a, b) for a, b in pairs)
    return replace(found, different=different, file_bytes_last=found.file_bytes_last + left)


def _trained(name: str, network: nn.Module, steps: int, every: int, folder: str) -> tuple[Soak, list[torch.Tensor]]:
    """What is found of `steps` planned steps of `network`, and the state that they leave."""
    kind = MODELS[name]
    model, optimizer = planned(network, kind, folder)
    budget, sequence = model.budget, model.sequence
    assert budget is not None
    assert sequence is not None
    peaks: list[int] = []
    kept: list[int] = []
    live: list[int] = []
    resident: list[int] = []
    files: list[tuple[int, int]] = []
    for number, step in enumerate(_steps(model, optimizer, steps)):
        if number % every or number < 2 * every:  # shapes of all kinds were seen by then, and the optimizer has a state
            step()
            continue
        gc.collect()
        live.append(live_bytes())
        resident.append(resident_bytes())
        files.append((file_bytes(model), open_files()))
        before = storage_bytes(_state(model, optimizer))
        with memory_meter(CPU) as meter:
            step()
            model.zero_grad()
        peaks.append(before + meter.phases[""].peak)
        kept.append(meter.phases[""].end)
    found = Soak(
        model=name,
        steps=steps,
        samples=len(peaks),
        # With a way that was forced upon it, the plan needs less than its limit.
        limit_bytes=budget.peak_bytes(sequence) if kind.way else model.plan().mem_limit,
        peak_bytes=max(peaks),
        live_bytes_first=live[0],
        live_bytes_last=live[-1],
        live_bytes_most=max(live),
        kept_bytes=max(kept),
        different=0,
        kept_so=kept_so(model, kind),
        file_bytes_first=files[0][0],
        file_bytes_last=files[-1][0],
        open_files_first=files[0][1],
        open_files_last=files[-1][1],
        resident_bytes_first=resident[0],
        resident_bytes_last=resident[-1],
    )
    return found, _state(model, optimizer)


def planned(network: nn.Module, kind: Kind, folder: str = "") -> tuple[Checkpointable, torch.optim.Optimizer]:
    """`network`, planned for the largest batch and a limit at which some of it is recomputed; and its optimizer.

    What the plan keeps in which way is not to depend on clocks: all ways are offered, and the link is fast.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    told = {"step_in_backward": optimizer} if kind.stepped else {"optimizer": optimizer, "fresh_grads": True}
    options = {**kind.options, **told, "cache": False, **({"offload": f"file:{folder}"} if kind.moves else {})}
    fast = 1e13
    with (
        patch("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways)),
        patch("rotor_py.offload.open_tier.measure_bandwidth", lambda *_: fast),
    ):
        model = Checkpointable(network, loss=_loss, **options)
        model.measure(_batch(0, BATCH))
    assert model.budget is not None
    least, most = model.budget.least_bytes(), model.budget.peak_bytes(store_all(model.budget.chain))
    sequence = model.compute_sequence(int(least + SHARE * (most - least)))
    if kind.way:
        model.sequence = _all_kept(sequence, kind.way, model.inspection_values.way_names)
    return model, optimizer


def _all_kept(sequence: Sequence, way: str, names: Iterable[tuple[str, ...]]) -> Sequence:
    """A sequence that stores each stage in a way where `sequence` stores it, if the stage has that way."""
    at = [1 + each.index(way) if way in each else 0 for each in names]
    return Sequence(
        tuple(replace(each, option=at[each.stage]) if isinstance(each, ForwardEnable) else each for each in sequence)
    )


def kept_so(model: Checkpointable, kind: Kind) -> int:
    """Stages that are kept in the way that a row is about: run again, where it is about none."""
    sequence = model.sequence
    if kind.moves:
        return len(sequence.moves.stages) if sequence.moves else 0
    if kind.way:
        return sum(isinstance(each, ForwardEnable) and each.option > 0 for each in sequence)
    forwards = [each for each in sequence if not isinstance(each, Loss | Backward)]
    return len(forwards) - len(model.budget.chain)


def file_bytes(model: Checkpointable) -> int:
    """Bytes of the file of moved activations, and of it those that somebody has."""
    if model.budget.link is None:
        return 0
    tier = model._planner.model.tier
    tier._sweep()
    space = tier._space
    return space.end - sum(space._free.sizes.values()) + tier._file.size


def open_files() -> int:
    """Open files of this process; 0 where /proc is not there to say."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


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
    states = optimizer.state_dict()["state"]
    # By parameter: one that is stepped in the backward has its state first.
    return [*model.parameters(), *model.buffers(), *tensors_in([states[key] for key in sorted(states)])]


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
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    options = parser.parse_args()
    found = []
    for name in options.models or MODELS:
        found.append(soak(name, options.steps, max(2, options.steps // 100)))
        print(table(found[-1:]), flush=True)
    problems = [problem for each in found for problem in each.problems()]
    if options.write and not problems:
        from report import merged, write

        rows: list[dict[str, Any]] = merged("soak", [asdict(each) for each in found], CPU, MODELS)
        write("soak", table(found), rows, CPU)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
