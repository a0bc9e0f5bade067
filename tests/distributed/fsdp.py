"""What every process does in the tests of `fully_shard`."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.utils import _to_kwargs

from rotor_profiling import stage_signature
from rotor_profiling.stage.seconds import StageSeconds
from rotor_profiling.storage import local
from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.capture import fsdp_markers
from rotor_py.distributed.sharding import ShardGroup, gathered, groups_of, sharding_of
from rotor_py.measure import rounds
from tests.distributed.fsdp_models import LENGTH, WIDTH, batches, loss, made
from tests.distributed.processes import device, here, kept, logs, mesh, present_bytes
from tests.distributed.steps import between, same_as_plain

warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


@contextmanager
def free_to_store_in_part() -> Iterator[None]:
    """All stages seem to take as long, and ways to store them no time, so that plans choose them, and the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "estimate", lambda runs: [StageSeconds(1.0, 1.0, 2.0, 0.0)] * len(runs[0].ways))
        yield


def same(
    rank: int, kind: str, options: str = "plain", accumulated: int = 1, share: float = 0.5
) -> tuple[str, list[str], int, int, int]:
    """As `same_as_plain` for a model of `fully_shard`."""
    make, given = partial(made, kind, options), batches(kind, rank, 3 * accumulated)
    return same_as_plain(make, given, loss, share, accumulated, seed=rank)


def same_in_part(rank: int, kind: str, options: str, share: float) -> tuple[Any, ...]:
    """As `same`, with stages stored in part; and how often parameters were gathered to make values again."""
    gathered, gather = 0, ShardGroup.gather

    def counted(group: ShardGroup) -> None:
        nonlocal gathered
        gathered += inspect.stack()[1].function == "need"
        gather(group)

    with pytest.MonkeyPatch.context() as patch, free_to_store_in_part():
        patch.setattr(ShardGroup, "gather", counted)
        return (*same(rank, kind, options, 1, share), gathered)


def planned_in_part(rank: int, kind: str, share: float) -> Checkpointable:
    """A model that may be stored in part, within a limit."""
    with free_to_store_in_part():
        found = Checkpointable(made(kind, "plain"), here(batches(kind, rank, 1)[0]), loss=loss)
        found.compute_sequence(between(found, share))
    return found


def way_names(planned: Checkpointable) -> list[str]:
    """The ways to store each stage, as one text."""
    assert planned.inspection_values is not None
    return [" ".join(names) for names in planned.inspection_values.way_names]


def same_step(networks: list[nn.Module], seed: int = 1, **batch: torch.Tensor) -> None:
    """Assert that a step has the same loss and gradients for both."""
    found = []
    for network in networks:
        torch.manual_seed(seed)
        network.zero_grad()
        value = loss(network(**batch))
        value.backward()
        gradients = [p.grad for p in network.parameters()]
        found.append([kept(value), *(each if each is None else kept(local(each)) for each in gradients)])
    assert all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True))


def around_a_step(rank: int, folder: str) -> None:
    """A first step that plans, a smaller batch, other plans, a model with a plan from a file, and eval mode."""
    batch, plain = here(batches("skips", rank, 1)[0]), made("skips", "mixed")
    own = sum(p.to_local().nbytes for p in plain.parameters())  # parameters and gradients; of `plain` as well on CUDA
    before = present_bytes() + (device().type == "cuda") * own
    planned = Checkpointable(made("skips", "mixed"), mem_limit=985_000 + 2 * own + before, loss=loss)
    for value in (batch["value"], batch["value"][:3]):
        same_step([plain, planned], value=value)
        assert "CF_" in str(planned.sequence)
        assert planned.inspection_values is not None
        assert len(planned.inspection_values.carried) == 1  # the skip connection
    for trained in (False, True):  # another plan has to be made for each
        for network in (plain, planned):
            network.blocks[2].wide.requires_grad_(trained)
        same_step([plain, planned], **batch)
    planned.save_plan(Path(folder) / f"{rank}.json")
    another = Checkpointable(made("skips", "mixed"), plan=Path(folder) / f"{rank}.json")
    same_step([plain, another], **batch)
    assert another.sequence == planned.sequence
    assert torch.equal(plain.eval()(**batch), planned.eval()(**batch))


def hooks_that_come_later(rank: int, folder: str) -> list[str]:
    """What is warned of a layer that gets a hook when it is stored in part; a plan from a file goes on in part."""
    plain, batch = made("layers", "plain"), here(batches("layers", rank, 1)[0])
    planned, path = planned_in_part(rank, "layers", 0.6), Path(folder) / f"{rank}.json"
    assert "^" in str(planned.sequence)
    planned.save_plan(path)
    loaded = Checkpointable(made("layers", "plain"), plan=path)
    for network, rows in ((planned, None), (planned, 100), (loaded, 100)):
        same_step([plain, network], input=batch["input"][:rows])
    assert loaded.sequence == planned.sequence
    for network in (plain, planned.model):
        for layer in list(network)[:-1]:
            layer.wide.register_forward_hook(lambda module, args, output: output * 2)
    with logs() as said:
        same_step([plain, planned], **batch)
    return said


def stored_in_part(rank: int, kind: str) -> tuple[list[bool], int]:
    """Which layers of a chain may be stored in part; whole parameters that are left when all have been measured."""
    batch = here(batches(kind, rank, 1)[0])
    with free_to_store_in_part():
        planned = Checkpointable(made(kind, "plain"), batch, loss=loss)
    gc.collect()
    parameters = [each for each in gc.get_objects() if type(each) is nn.Parameter]
    # FSDP has made none of its own yet: no step was taken.
    whole = sum(each.shape == (4 * WIDTH, WIDTH) and each.untyped_storage().nbytes() > 4 for each in parameters)
    same_step([made(kind, "plain"), planned], **batch)
    return ["in part" in each for each in way_names(planned)], whole


def kinds(rank: int) -> int:
    """How many kinds of layers are measured of four blocks that are sharded alike, and a head."""
    model, value = made("layers", "plain"), here(batches("layers", rank, 1)[0])["input"].requires_grad_()
    found = set()
    for layer in model:
        with gathered(layer, sharding_of(model, mixed_precision=False)):
            found.add(stage_signature(layer, value))
    return len(found)


def whole_at_once(rank: int, kind: str, every: int) -> tuple[int, int, str]:
    """How many groups are whole at most while a region is run again; how many groups there are; the sequence."""
    batch, plain = here(batches(kind, rank, 1)[0]), made(kind, "plain")
    planned = Checkpointable(model := made(kind, "plain"), batch, every_n_layers=every)
    counts, gather = [], ShardGroup.gather

    def counted(group: ShardGroup) -> None:
        gather(group)
        counts.append(sum(each.is_whole for each in groups_of(model)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGroup, "gather", counted)
        same_step([plain, planned], **batch)
    return max(counts), len(groups_of(model)), str(planned.sequence)


class Broken(nn.Linear):
    """Makes TorchDynamo break the graph."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(value) + value


@dataclass
class Wrapped:
    value: torch.Tensor


class Wrapping(nn.Linear):
    """Returns what TorchDynamo cannot look into."""

    def forward(self, value: torch.Tensor) -> Any:
        return Wrapped(super().forward(value))


class Still(nn.Linear):
    """Nothing in it has a gradient."""

    @torch.no_grad()
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) + value


class Outer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = self.layer(value)
        return value + (made.value if isinstance(made, Wrapped) else made)


def refusal(rank: int, kind: str) -> str:
    """What is said of a model that cannot be trained from a plan, at its first step."""
    model: nn.Module = Outer({"wrapping": Wrapping, "still": Still}.get(kind, Broken)(WIDTH, WIDTH))
    fully_shard(model.layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_markers, "TORCH", (2, 5) if kind == "old torch" else fsdp_markers.TORCH)
        with pytest.raises(UnsupportedModelError) as caught:
            Checkpointable(model)(torch.randn(LENGTH, WIDTH))
    return str(caught.value)


def begun_with_nothing(rank: int) -> tuple[Any, ...]:
    """What a group returns where no input needs a gradient, with a hook that moves inputs as FSDP's does on CUDA."""
    group = groups_of(made("chain", "plain"))[0]
    (hook,) = group._before

    def moving(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        moved_args, moved_kwargs = _to_kwargs(args, kwargs, device(), False)
        return moved_args[0], moved_kwargs[0]

    group.modules[0]._forward_pre_hooks[hook] = moving
    return group.enter(0, ())
