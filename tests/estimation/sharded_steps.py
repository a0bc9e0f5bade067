"""Steps of a model of `fully_shard`, in real processes and in simulated ones."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from rotor_profiling import memory_meter
from rotor_profiling.backends import using
from rotor_profiling.memory import Phase
from rotor_py import Checkpointable, InfeasibleError, Plan
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.fake_tensors import FakeCopies
from rotor_py.estimation.simulated_step import SimulatedStep, find_room
from rotor_py.estimation.simulated_target import PredictedDevice, shard_parameters, world_of
from rotor_py.plan.observers import watched_steps
from rotor_solver import store_all
from tests.checkpointable.steps import CPU, Stack
from tests.distributed import fsdp_models
from tests.distributed.processes import mesh, on_all_ranks
from tests.estimation.conftest import Block

WIDTH, ROWS = 64, 256
ON_THE_CPU = PredictedDevice("cpu", 10**12, lambda *call: 1e-6)


def blocks() -> Stack:
    """A transformer without attention: blocks, and layers around them."""
    return Stack(nn.Linear(WIDTH, WIDTH), *(Block(WIDTH, 0.0) for _ in range(2)), nn.Linear(WIDTH, 512))


CASES = {
    "blocks": lambda: (blocks(), {"x": torch.randn(ROWS, WIDTH)}),
    "llama": lambda: (fsdp_models.llama(num_hidden_layers=1), fsdp_models.batches("llama", 0, 1)[0]),
}
"""Models that are made anew at each call, each with a batch."""


def loss(output: Any) -> torch.Tensor:
    # Of 16 bits, the CPU's kernel would make numbers of 32 for itself.
    return output.loss if hasattr(output, "loss") else output.float().square().mean()


def plain_step(model: nn.Module, value: dict[str, Any]) -> Callable[[Callable[[str], None]], None]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(begins: Callable[[str], None]) -> None:
        begins("forward")
        output = model(**value)
        found = loss(output)
        begins("backward")
        found.backward()
        begins("optimizer")
        del found, output
        optimizer.step()
        optimizer.zero_grad()

    return step


def peaks(step: Callable[[Callable[[str], None]], None]) -> dict[str, int]:
    """The peak of each phase of a second step, beyond what is there when it begins."""
    step(lambda _: None)
    with memory_meter(CPU) as meter:
        step(meter.mark)
    return {name: phase.peak for name, phase in meter.phases.items()}


def sharded(model: nn.Module, over: DeviceMesh, precision: torch.dtype | None) -> nn.Module:
    shard_parameters(model, over, precision=precision)
    return model.train()


@dataclass(frozen=True)
class PlannedStep:
    """A plan made on fake tensors: its sequence, its promise, and the peaks of the phases of its step.

    Peaks are beyond what is `present` before the step. `communication` is that of the step, `bound` that of any step.
    """

    sequence: str
    promised: int
    present: int
    peaks: dict[str, int]
    communication: int
    bound: int


def planned_step(kind: str, count: int, precision: torch.dtype | None, share: float, path: Path) -> PlannedStep:
    """A plan for `count` simulated processes, saved at `path`, so far from the least to storing everything."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with using(ON_THE_CPU), world_of(count) as over, mode:
        plain, value = CASES[kind]()
        model = sharded(FakeCopies(mode).model(plain), over, precision)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        told = {"loss": loss, "optimizer": optimizer, "fresh_grads": True}
        network = Checkpointable(model, value, "1GB", cache=False, watch=False, **told)
        bound = network.budget.fixed.communication
        step = SimulatedStep(network, value, loss, optimizer, fresh_grads=True)
        find_room(step, find_device("h100"))
        least, most = network.budget.least_bytes(), network.budget.peak_bytes(store_all(network.budget.chain))
        network.mem_limit = int(least + share * (most - least))
        while True:  # a plan for less gathers more, and has a larger least limit
            try:
                find_room(step, find_device("h100"))
                sequence = network.compute_sequence()
                break
            except InfeasibleError as error:
                network.mem_limit = error.min_bytes
        network.save_plan(path)
        fixed = network.budget.fixed
        found = peaks(plain_step(network, value))
        promised, present = network.budget.peak_bytes(sequence), fixed.total - fixed.communication
        return PlannedStep(str(sequence), promised, present, found, fixed.communication, bound)


def real_peaks(rank, kind, precision: Any, path: Path, enough: dict[str, int] | None = None) -> dict[str, int]:
    """In one of several processes: peaks of a step by the plan at `path`, each the least of several.

    No more steps are taken once all processes have seen none that are above those that are `enough`.
    """
    plain, value = CASES[kind]()
    model = sharded(plain, mesh(), precision)
    model = Checkpointable(model, plan=path, loss=loss, fresh_grads=True, watch=False)
    # The profiler misses a free if a thread of the backend is the last to release what was sent.
    least = peaks(plain_step(model, value))
    for _ in range(19):
        # Phases but for a few numbers, the largest of them as it is.
        inside = enough is not None and max(least.values()) <= max(enough.values())
        if on_all_ranks(inside and all(least[name] <= 1.001 * enough[name] for name in enough or ())):
            break
        least = {name: min(least[name], peak) for name, peak in peaks(plain_step(model, value)).items()}
    return least


def first_measured(rank: int, kind: str, path: Path, rows: list[list[int]], seen: list[int]) -> int | None:
    """In one of several processes, steps by a predicted plan, each on so many samples (by rank).

    Each rank's steps are `seen` to take so much: on the CPU, a watch sees nothing of several processes. Returns the
    number of the step before which the model was measured, or None.
    """
    plain, value = CASES[kind]()
    model = Checkpointable(sharded(plain, mesh(), None), plan=path, loss=loss, fresh_grads=True)
    predicted = Plan.load(path).costs.measurement
    for number, samples in enumerate(rows):
        model.zero_grad()
        with patch.object(watched_steps, "watch_step", lambda *_: _Seen(seen[rank])):
            loss(model(**{name: each[: samples[rank]] for name, each in value.items()})).backward()
        if model.inspection_values != predicted:
            return number
    return None


class _Seen:
    """A watch over a step that has taken so many bytes, none of them for the loss."""

    def __init__(self, peak: int) -> None:
        self._peak, self._names = peak, [""]

    def mark(self, name: str) -> None:
        self._names.append(name)

    def stop(self) -> dict[str, Phase]:
        return {name: Phase(0, 0 if name.startswith("loss") else self._peak, 0) for name in self._names}
