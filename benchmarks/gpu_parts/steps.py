"""One training step, taken in one way or another: its peak, its seconds, its trace."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config  # torch 2.11 does not import it by itself
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from gpu_parts.models import Case
from rotor_profiling import measured_peak, tensors_in

aten = torch.ops.aten
_KEPT = {aten.mm.default, aten.addmm.default, aten.bmm.default,
         aten.convolution.default, aten.cudnn_convolution.default,
         aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
         aten._scaled_dot_product_cudnn_attention.default,
         aten._scaled_dot_product_flash_attention_for_cpu.default}  # fmt: skip
"""What selective checkpointing keeps, every second matrix product left out, as in torchtitan."""


class SkippedError(Exception):
    """A row without numbers that is no failure: a model does not have this way, or what it needs is not there."""


@dataclass(frozen=True)
class Measured:
    """Of whole steps that start without gradients. Seconds are those of forward, loss and backward."""

    peak_bytes: int
    reserved_bytes: int | None
    seconds: float
    optimizer_seconds: float
    loss: float


class Trainee:
    """A case on a device, whose forward runs in some way."""

    def __init__(self, case: Case, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.model, self.sample = case.new(batch, device)
        self.optimizer = case.optimizer(self.model.parameters())
        self.run: Callable[[torch.Tensor], torch.Tensor] = self.model

    def forward_backward(self) -> torch.Tensor:
        with self.case.precision(self.device):
            output = self.run(self.sample)  # held through the backward, as in most loops, and as plans promise
            loss = self.case.loss(output)
        loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward()
        self.optimizer.step()
        return loss

    def measured(self, repeats: int) -> Measured:
        """Two steps warm up, one is measured in bytes, `repeats` in seconds."""
        first = self.step().item()
        self.step()
        self.optimizer.zero_grad(set_to_none=True)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        state = tensors_in([list(each.values()) for each in self.optimizer.state.values()])
        present = [*self.model.parameters(), *self.model.buffers(), *state, self.sample]
        peak = measured_peak(self.step, present, self.device)
        reserved = torch.cuda.max_memory_reserved() if cuda else None
        taken = [self._timed() for _ in range(repeats)]
        seconds, optimizer = (statistics.median(each) for each in zip(*taken, strict=True))
        return Measured(peak, reserved, seconds, optimizer, first)

    def _timed(self) -> tuple[float, float]:
        self.optimizer.zero_grad(set_to_none=True)
        times = [self._now()]
        self.forward_backward()
        times.append(self._now())
        self.optimizer.step()
        times.append(self._now())
        return times[1] - times[0], times[2] - times[1]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def recorded(self, folder: Path, name: str) -> list[str]:
        """The names of files with a trace of one step, and on CUDA with a snapshot of its memory."""
        cuda = self.device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            self.step()
        trace = f"{name}.trace.json.gz"
        profile.export_chrome_trace(str(folder / trace))
        if not cuda:
            return [trace]
        snapshot = f"{name}.memory.pickle"
        torch.cuda.memory._record_memory_history(max_entries=200_000, context=None)
        try:
            self.step()
            torch.cuda.memory._dump_snapshot(str(folder / snapshot))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        with open(folder / snapshot, "rb") as plain, gzip.open(folder / f"{snapshot}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        (folder / snapshot).unlink()
        return [trace, f"{snapshot}.gz"]


def plain(trainee: Trainee) -> None:
    """Everything is stored."""


def by_sequential(trainee: Trainee) -> None:
    """`checkpoint_sequential` with as many segments as the square root of the layers."""
    model = trainee.model
    if not trainee.case.chain or not isinstance(model, nn.Sequential):
        raise SkippedError("the model is no nn.Sequential")
    segments = max(2, round(len(model) ** 0.5))
    trainee.run = lambda value: checkpoint_sequential(model, segments, value, use_reentrant=False)


class Checkpointed(nn.Module):
    """A block that torch.utils.checkpoint runs again."""

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.block, value, use_reentrant=False, **self.options)
        return result


def by_blocks(trainee: Trainee, **options: Any) -> None:
    """torch.utils.checkpoint around every block."""
    for parent, name in trainee.case.blocks(trainee.model):
        setattr(parent, name, Checkpointed(getattr(parent, name), **options))


def selectively(trainee: Trainee) -> None:
    """Selective checkpointing of every block: matrix products, every second one, and attention are kept."""

    def contexts() -> Any:
        products: dict[bool, int] = defaultdict(int)

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if func not in _KEPT:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if func in (aten.mm.default, aten.addmm.default):
                products[context.is_recompute] += 1
                if products[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)

    by_blocks(trainee, context_fn=contexts)


def compiled(trainee: Trainee, budget: float | None = None) -> None:
    """torch.compile, whose partitioner keeps so large a part of what it would keep."""
    torch._dynamo.reset()  # in one process, the code of another row would be found
    if budget is not None:
        functorch_config.activation_memory_budget = budget
    # On a CPU, C++ would be compiled for minutes, and it is a rehearsal; the partitioner is the same.
    trainee.run = torch.compile(trainee.model, backend="inductor" if trainee.device.type == "cuda" else "aot_eager")


WAYS: dict[str, Callable[[Trainee], None]] = {
    "plain": plain,
    "checkpoint_sequential": by_sequential,
    "checkpoint-blocks": by_blocks,
    "selective": selectively,
    "compile": compiled,
    "compile-budget-0.5": lambda trainee: compiled(trainee, 0.5),
    "compile-budget-0.2": lambda trainee: compiled(trainee, 0.2),
}


@contextlib.contextmanager
def budget_restored() -> Iterator[None]:
    """In one process, another row would find the budget of the last."""
    before = functorch_config.activation_memory_budget
    try:
        yield
    finally:
        functorch_config.activation_memory_budget = before
