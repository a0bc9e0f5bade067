"""What every process does in the tests of layers of an `nn.Sequential` of `fully_shard` that are stored in part."""

from __future__ import annotations

import gc
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rotor_profiling import stage_signature
from rotor_py import Checkpointable
from rotor_py.distributed.sharding import gathered, sharding_of
from tests.distributed import fsdp
from tests.distributed.fsdp import WIDTH, batches, loss
from tests.distributed.processes import here, kept, mesh
from tests.distributed.ways import free_to_store_in_part


class Block(nn.Module):
    """GPT-2's feed-forward layer, with the activation written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = self.inner(self.norm(value))
        made = 0.5 * made * (1.0 + torch.tanh(0.8 * (made + 0.044715 * made.pow(3.0))))
        return value + self.dropout(self.outer(made))


class Odd(Block):
    """A block, and something that no graph has."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) * float(value.detach()[0, 0] < 1e9)


class Otherwise(Block):
    """A block that saves less where it is captured."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.norm(value).exp()
        return super().forward(value)


def chain(*first: type[Block]) -> nn.Sequential:
    torch.manual_seed(0)
    kinds = [*first, *[Block] * (4 - len(first))]
    return nn.Sequential(*(kind() for kind in kinds), nn.Linear(WIDTH, 4)).train()


def shard(model: nn.Sequential, how: str, **options: Any) -> nn.Sequential:
    """Divide a chain among processes: each block alone; a part of one by itself; two together, some with the model."""
    options = {"mesh": mesh(), **options}
    match how:
        case "alone" | "inside":
            if how == "inside":
                fully_shard(model[2].inner, **options)
            for block in list(model)[:-1]:
                fully_shard(block, **options)
        case "together":
            fully_shard(model[0], **options)
            fully_shard([model[2], model[3]], **options)
    return fully_shard(model, **options)


def sharded(how: str, **options: Any) -> nn.Sequential:
    return shard(chain(), how, **options)


def same_in_part(rank: int, how: str, options: dict[str, Any], share: float) -> tuple[str, list[str], int, int, int]:
    """As `fsdp.same_as_plain`, with a plan that stores layers in part."""
    with free_to_store_in_part():
        return fsdp.same_as_plain(rank, options, partial(sharded, how), share)


def offered(planned: Checkpointable) -> list[bool]:
    """Which stages may be stored in part."""
    assert planned.inspection_values is not None
    return [any("in part" in each for each in ways) for ways in planned.inspection_values.way_names]


def which_are_captured(rank: int) -> list[bool]:
    """Of a chain with layers that are not captured as they stand, those that may be stored in part; they train as ever.

    Of the third, a part is divided by itself.
    """
    first = [shard(chain(Odd, Otherwise), "inside") for _ in range(2)]
    with free_to_store_in_part():
        planned = Checkpointable(first[1], loss=loss)
        planned.compute_sequence(fsdp.limit_between(planned, rank, 0.6))
        assert_same_gradients([first[0], planned], here(batches(rank)[0]))
        return offered(planned)


def kinds(rank: int) -> list[int]:
    """For each layer, the first one that costs the same."""
    model, value = sharded("alone"), here(batches(rank)[0]).requires_grad_()
    found = []
    for layer in model:
        with gathered(layer, sharding_of(model, mixed_precision=False)):
            found.append(stage_signature(layer, value))
    return [found.index(kind) for kind in found]


def held_after_measuring(rank: int) -> int:
    """How many parameters are whole when all layers have been measured."""
    planned = Checkpointable(sharded("alone"), loss=loss)
    planned.measure(here(batches(rank)[0]))
    assert any(offered(planned))
    gc.collect()
    parameters = [each for each in gc.get_objects() if type(each) is nn.Parameter]
    # FSDP has made none of its own yet: no step was taken.
    return sum(each.shape == (4 * WIDTH, WIDTH) and each.untyped_storage().nbytes() > 4 for each in parameters)


def around_a_step(rank: int, folder: str) -> list[str]:
    """A smaller batch, gradients that add up, a plan from a file, a hook that comes later; what was warned of."""
    plain, batch = sharded("alone"), here(batches(rank)[0])
    with free_to_store_in_part():
        planned = Checkpointable(sharded("alone"), loss=loss)
        planned.compute_sequence(fsdp.limit_between(planned, rank, 0.6))
    assert "^" in str(planned.sequence)
    for value in (batch, batch[:100]):
        assert_same_gradients([plain, planned], value)
    for network in (plain, planned):
        network.zero_grad()
    for last in (False, True):
        for network in (plain, planned.model):
            network.set_requires_gradient_sync(last)
        for network in (plain, planned):
            torch.manual_seed(1)
            loss(network(batch)).backward()
    assert same_gradients(plain, planned)
    path = Path(folder) / f"{rank}.json"
    planned.save_plan(path)
    loaded = Checkpointable(sharded("alone"), plan=path)
    assert_same_gradients([plain, loaded], batch)
    assert loaded.sequence == planned.sequence
    told = _Told()
    logging.getLogger("rotor_py").addHandler(told)
    for network in (plain, planned.model):
        network[3].inner.register_forward_hook(lambda module, args, output: output * 2)
    assert_same_gradients([plain, planned], batch)
    logging.getLogger("rotor_py").removeHandler(told)
    return told.warnings


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


def assert_same_gradients(networks: list[nn.Module], value: torch.Tensor) -> None:
    losses = []
    for network in networks:
        torch.manual_seed(1)
        network.zero_grad()
        losses.append(loss(network(value)))
        losses[-1].backward()
    assert torch.equal(*map(kept, losses))
    assert same_gradients(*networks)


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
