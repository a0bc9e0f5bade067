"""What every process does in the tests of `fully_shard` of models that are no chain."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _to_kwargs
from torch.optim import Adam, Optimizer

from rotor_profiling import tensors_in
from rotor_profiling.storage import local
from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.capture import fsdp_markers
from rotor_py.distributed.sharding import ShardGroup, groups_of
from rotor_solver import store_all
from tests.distributed import fsdp
from tests.distributed.fsdp_models import LENGTH, WIDTH, batches, loss, made
from tests.distributed.processes import device, here, kept, least_peak, mesh, present_bytes, random_state
from tests.distributed.ways import free_to_store_in_part

Numbers = dict[str, torch.Tensor]


def trained(kind: str, rank: int, model: nn.Module, optimizer: Optimizer, accumulated: int = 1) -> Numbers:
    """All numbers of three steps."""
    torch.manual_seed(rank)
    numbers: Numbers = {}
    given = batches(kind, rank, 3 * accumulated)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(accumulated):
            set_sync(model, number == accumulated - 1)
            value = loss(model(**here(given[step * accumulated + number])))
            value.backward()
            numbers[f"loss {step} {number}"] = kept(value)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert isinstance(parameter.grad, DTensor), name
                numbers[f"gradient {step} {name}"] = kept(parameter.grad.to_local())
        optimizer.step()
    numbers |= {name: kept(p.to_local()) for name, p in model.named_parameters()}
    numbers["random"] = random_state()
    return numbers


def set_sync(model: nn.Module, on: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(on)


def same_as_plain(
    rank: int, kind: str, options: str, accumulated: int = 1, share: float = 0.5
) -> tuple[str, list[str], int, int, int]:
    """The sequence, the names of numbers that differ; limit, prediction and measured peak of a step with a plan.

    The limit is so much of the way from the least possible to storing everything.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model = made(kind, options)
    expected = trained(kind, rank, model, Adam(model.parameters()), accumulated)
    model = made(kind, options)
    optimizer = Adam(model.parameters())
    set_sync(model, accumulated == 1)
    measured_stages: list[str] = []
    planned = Checkpointable(
        model,
        here(batches(kind, rank, 1)[0]),
        loss=loss,
        optimizer=optimizer,
        progress=lambda done, count, name: measured_stages.append(name),
    )
    measured_stages.clear()
    assert planned.budget is not None
    least, most = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    limit = least + int(share * (most - least))
    sequence = planned.compute_sequence(limit)
    found = trained(kind, rank, planned, optimizer, accumulated)
    different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    predicted = planned.budget.peak_bytes(sequence)
    measured = measured_peak_of(kind, rank, planned, optimizer, accumulated, predicted)
    assert measured_stages == []  # it is not planned again
    return str(sequence), different, limit, predicted, measured


def same_in_part(rank: int, kind: str, options: str, share: float) -> tuple[Any, ...]:
    """As `same_as_plain`, with stages stored in part; and how often parameters were gathered to make values again."""
    gathered, gather = 0, ShardGroup.gather

    def counted(group: ShardGroup) -> None:
        nonlocal gathered
        gathered += inspect.stack()[1].function == "need"
        gather(group)

    try:
        ShardGroup.gather = counted
        with free_to_store_in_part():
            return (*same_as_plain(rank, kind, options, 1, share), gathered)
    finally:
        ShardGroup.gather = gather


def rounded(rank: int) -> tuple[list[str], list[str], float]:
    """With `keep="bf16"`: ways of the stages, names of losses that differ, and the largest difference of a gradient as
    a part of its length.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    batch = here(batches("skips", rank, 1)[0])
    gradients, losses = [], []
    with free_to_store_in_part():
        for keep in (None, "bf16"):
            model = made("skips", "plain")
            torch.manual_seed(rank)
            planned = Checkpointable(model, batch, loss=loss, keep=keep)
            if keep is not None:
                assert planned.budget is not None
                planned.compute_sequence(planned.budget.least_bytes() + 500_000)
                assert "^" in str(planned.sequence)
                assert planned.inspection_values is not None
                names = sorted({each for ways in planned.inspection_values.way_names for each in ways})
            torch.manual_seed(rank)
            value = loss(planned(**batch))
            value.backward()
            losses.append(kept(value))
            gradients.append([kept(p.grad.to_local()) for p in model.parameters() if p.grad is not None])
    apart = max(float((one - other).norm() / one.norm()) for one, other in zip(*gradients, strict=True))
    return names, [] if torch.equal(*losses) else ["loss"], apart


def measured_peak_of(
    kind: str, rank: int, planned: Checkpointable, optimizer: Optimizer, accumulated: int, enough: int
) -> int:
    """The peak of a step; see `least_peak`."""
    batch = here(batches(kind, rank, 1)[0])
    state = [list(entry.values()) for entry in optimizer.state.values()]
    parameters = list(planned.parameters())
    sharded = [*tensors_in(state), *parameters, *(p.grad for p in parameters if p.grad is not None)]

    def step() -> None:
        for number in range(accumulated):
            set_sync(planned, number == accumulated - 1)
            loss(planned(**batch)).backward()

    present = [*map(local, sharded), *planned.buffers(), *tensors_in(batch)]
    return least_peak(step, present, enough)


def around_a_step(rank: int, folder: str) -> None:
    """A first step that plans, a smaller batch, other plans, a model with a plan from a file, and eval mode."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    batch, plain = here(batches("skips", rank, 1)[0]), made("skips", "mixed")
    own = sum(p.to_local().nbytes for p in plain.parameters())  # parameters and gradients; of `plain` as well on CUDA
    before = present_bytes() + (device().type == "cuda") * own
    model = made("skips", "mixed")
    planned = Checkpointable(model, mem_limit=985_000 + 2 * own + before, loss=loss)
    assert list(planned.state_dict()) == list(plain.state_dict())
    for value in (batch["value"], batch["value"][:3]):
        same_gradients([plain, planned], value=value)
        assert "CF_" in str(planned.sequence)
        assert planned.inspection_values is not None
        assert len(planned.inspection_values.carried) == 1  # the skip connection
    for trained in (False, True):  # another plan has to be made for each
        for network in (plain, planned):
            network.blocks[2].wide.requires_grad_(trained)
        same_gradients([plain, planned], **batch)
    planned.save_plan(Path(folder) / f"{rank}.json")
    another = Checkpointable(made("skips", "mixed"), plan=Path(folder) / f"{rank}.json")
    same_gradients([plain, another], **batch)
    assert another.sequence == planned.sequence
    assert torch.equal(plain.eval()(**batch), planned.eval()(**batch))


def same_gradients(networks: list[nn.Module], **batch: torch.Tensor) -> None:
    for network in networks:
        torch.manual_seed(1)
        network.zero_grad()
        loss(network(**batch)).backward()
    for expected, found in zip(*(network.parameters() for network in networks), strict=True):
        assert (expected.grad is None) == (found.grad is None)
        assert expected.grad is None or torch.equal(expected.grad.to_local(), found.grad.to_local())


def whole_at_once(rank: int, kind: str) -> tuple[int, int]:
    """How many groups are whole at most while a region is run again; how many groups there are."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model = fsdp.sharded() if kind == "chain" else made(kind, "plain")
    batch = here(fsdp.batches(rank)[0] if kind == "chain" else batches(kind, rank, 1)[0])
    planned = Checkpointable(model, batch, every_n_layers=4)
    counts, gather = [], ShardGroup.gather

    def counted(group: ShardGroup) -> None:
        gather(group)
        counts.append(sum(each.is_whole for each in groups_of(model)))

    try:
        ShardGroup.gather = counted
        value = planned(batch) if kind == "chain" else planned(**batch)
        loss(value).backward()
    finally:
        ShardGroup.gather = gather
    return max(counts), len(groups_of(model))


def cut_anywhere(rank: int) -> list[str]:
    """The sequences of plans whose regions begin in the middle of a layer, and end in another one."""
    plain, batch = made("llama", "plain"), here(batches("llama", rank, 1)[0])
    sequences = []
    for number in (2, 3, 4):
        planned = Checkpointable(made("llama", "plain"), batch, every_n_layers=number)
        same_gradients([plain, planned], **batch)
        sequences.append(str(planned.sequence))
    return sequences


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


class Outer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = self.layer(value)
        return value + (made.value if isinstance(made, Wrapped) else made)


class Still(nn.Linear):
    """Nothing in it has a gradient."""

    @torch.no_grad()
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) + value


def refusal(rank: int, kind: str) -> str:
    """What is said of a model that cannot be trained from a plan, at its first step."""
    model: nn.Module = Outer({"wrapping": Wrapping, "still": Still}.get(kind, Broken)(WIDTH, WIDTH))
    fully_shard(model.layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    present = fsdp_markers.TORCH
    try:
        if kind == "old torch":
            fsdp_markers.TORCH = (2, 5)
        Checkpointable(model)(torch.randn(LENGTH, WIDTH))
    except UnsupportedModelError as error:
        return str(error)
    finally:
        fsdp_markers.TORCH = present
    return "nothing"


def begun_with_nothing(rank: int) -> tuple[Any, ...]:
    """What a group returns where no input needs a gradient, with a hook that moves inputs as FSDP's does on CUDA."""
    group = groups_of(fsdp.sharded())[0]
    (hook,) = group._before

    def moving(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        moved_args, moved_kwargs = _to_kwargs(args, kwargs, device(), False)
        return moved_args[0], moved_kwargs[0]

    group.modules[0]._forward_pre_hooks[hook] = moving
    return group.enter(0, ())
