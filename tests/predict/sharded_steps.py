"""Steps of a model of `fully_shard`, the same for real processes and for those that are not there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotor_profiling import memory_meter
from rotor_py.predict.sharding import shard_blocks
from tests.distributed.processes import mesh

WIDTH, ROWS = 64, 256
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = value + self.back(nn.functional.gelu(self.into(value)))
        return out


class Blocks(nn.Module):
    """A transformer without attention: blocks in a list, and layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.last = nn.Linear(WIDTH, 512)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.first(value)
        for block in self.blocks:
            value = block(value)
        out: torch.Tensor = self.last(value)
        return out


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()  # of 16 bits, the CPU's kernel would make numbers of 32 for itself


def plain_step(model: nn.Module, value: torch.Tensor) -> Callable[[Callable[[str], None]], None]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(begins: Callable[[str], None]) -> None:
        begins("forward")
        output = model(value)
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
    shard_blocks(model, over, precision)
    return model.train()


def real_peaks(rank: int, precision: torch.dtype | None) -> dict[str, int]:
    """In one of several processes: the peaks of a plain step, each the least of several."""
    # The profiler misses a free if a thread of the backend is the last to let go of what was sent.
    found = [peaks(plain_step(sharded(Blocks(), mesh(), precision), torch.randn(ROWS, WIDTH))) for _ in range(3)]
    return {name: min(each[name] for each in found) for name in found[0]}
