"""`fully_shard` (FSDP2): parameters gathered, freed and sent by PyTorch, inside of a plan's regions and graphs."""

import gc
import inspect
import re
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

from rotor_profiling import stage_signature
from rotor_profiling.stage.seconds import StageSeconds
from rotor_profiling.storage import local
from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.capture import fsdp_markers
from rotor_py.distributed.sharding import ShardGroup, gathered, groups_of, sharding_of
from rotor_py.measure import rounds
from tests.checkpointable.steps import Made, planned_at
from tests.distributed.fsdp_models import LENGTH, WIDTH, batches, loss, made
from tests.distributed.processes import Processes, assert_same_inside, here, kept, logs, mesh
from tests.distributed.steps import Found, between, same_as_plain

slow = pytest.mark.slow
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


@contextmanager
def free_to_store_in_part() -> Iterator[None]:
    """All stages seem to take as long, and ways to store them no time, so that plans choose them, and the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "estimate", lambda runs: [StageSeconds(1.0, 1.0, 2.0, 0.0)] * len(runs[0].ways))
        yield


def same(rank: int, kind: str, options: str = "plain", accumulated: int = 1, share: float = 0.5) -> Found:
    make, given = partial(made, kind, options), batches(kind, rank, 2 * accumulated)
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


def same_step(networks: list[nn.Module], seed: int = 1, **batch: torch.Tensor) -> None:
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
    limit = between(Checkpointable(made("skips", "mixed"), batch, loss=loss), 0.3)
    planned = Checkpointable(made("skips", "mixed"), mem_limit=limit, loss=loss)
    for value in (batch["value"], batch["value"][:3]):
        same_step([plain, planned], value=value)
        assert "CF_" in str(planned.sequence)
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
    path = Path(folder) / f"{rank}.json"
    with free_to_store_in_part():
        planned = planned_at(0.6, made("layers", "plain"), batch, loss=loss)
    assert "^" in str(planned.sequence)
    planned.save_plan(path)
    loaded = Checkpointable(made("layers", "plain"), plan=path)
    for network, rows in ((planned, None), (planned, 100), (loaded, 100)):
        same_step([plain, network], input=batch["input"][:rows])
    assert loaded.sequence == planned.sequence
    for network in (plain, planned.model):
        for layer in list(network)[:-1]:
            layer.inner.register_forward_hook(lambda module, args, output: output * 2)
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
    return ["in part" in " ".join(names) for names in planned.inspection_values.way_names], whole


def kinds(rank: int) -> int:
    """How many kinds of layers are measured of blocks that are sharded alike, and a head."""
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


class Outer(Made):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = self.layer(value)
        return value + (made.value if isinstance(made, Wrapped) else made)


def refusal(rank: int, kind: str) -> str:
    """What is said of a model that cannot be trained from a plan, at its first step."""
    model: nn.Module = Outer(layer={"wrapping": Wrapping, "still": Still}.get(kind, Broken)(WIDTH, WIDTH))
    fully_shard(model.layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_markers, "TORCH", (2, 5) if kind == "old torch" else fsdp_markers.TORCH)
        with pytest.raises(UnsupportedModelError) as caught:
            Checkpointable(model)(torch.randn(LENGTH, WIDTH))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "accumulated", "share"),
    [
        ("chain", "plain", 1, 0.5),
        pytest.param("twice", "plain", 1, 0.5, marks=slow),
        pytest.param("tied llama", "mixed", 1, 0.4, marks=slow),
        pytest.param("skips together", "mixed, full out", 2, 0.3, marks=slow),
    ],
)
def test_numbers_are_those_of_plain_training_inside_the_limit(processes, kind, options, accumulated, share) -> None:
    found = processes.run(same, kind, options, accumulated, share)
    assert_same_inside(found)
    assert "CF_" in found[0][0]


@pytest.mark.parametrize(
    ("kind", "options", "share", "in_region", "gathers"),
    [
        ("skips", "plain", 0.1, True, False),
        pytest.param("layers", "kept", 0.7, False, False, marks=slow),
        # Values are made from what another group gathers.
        pytest.param("skips in parts", "plain", 0.5, True, True, marks=slow),
    ],
)
def test_stages_are_stored_in_part_inside_the_limit(processes, kind, options, share, in_region, gathers) -> None:
    found = processes.run(same_in_part, kind, options, share)
    assert_same_inside(found)
    for sequence, *_, gathers_seen in found if len(found) > 1 else []:  # one alone has all parameters: another plan
        assert "^" in sequence
        assert bool(re.search(r"CF_(\d+).* Fe_\1\^|Fn_(\d+).* Fe_\2\^", sequence)) == in_region
        assert bool(gathers_seen) == gathers


@slow
def test_steps_make_plans_and_use_those_of_larger_batches_and_other_models(processes, tmp_path: Path) -> None:
    processes.run(around_a_step, str(tmp_path))


def test_a_layer_that_gets_a_hook_stores_all_and_a_warning_says_so(processes: Processes, tmp_path: Path) -> None:
    for said in processes.run(hooks_that_come_later, str(tmp_path)):
        assert any("stores all saved tensors, not a part" in each for each in said)


def test_layers_of_a_chain_are_captured_alone_and_measured_without_whole_parameters(processes: Processes) -> None:
    # No graph has the first as it stands, the second saves something else, a part of the third is sharded.
    for found in processes.run(stored_in_part, "odd layers"):
        assert found == ([False, False, False, True, False], 0)
    assert processes.run(kinds) == [2] * len(processes.processes)


@pytest.mark.parametrize("kind", ["chain", "skips"])
def test_stages_that_are_run_again_are_not_gathered_all_at_once(processes: Processes, kind: str) -> None:
    for most, groups, sequence in processes.run(whole_at_once, kind, 4):
        assert groups > 4
        assert most <= 3  # the model's own, the one that goes backward, and one that is run again
        assert "Fn_" in sequence


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("broken", "does not capture its forward as one graph"),
        ("wrapping", "no tensor with a gradient was found in what"),
        ("still", "nothing in the graph of"),
        ("old torch", "needs torch 2.11 or newer"),
    ],
)
def test_models_that_cannot_be_captured_are_refused_in_one_sentence_by_all(processes, kind: str, cause: str) -> None:
    for said in processes.run(refusal, kind):
        assert cause in said
        assert "\n" not in said


def test_a_captured_model_is_planned_in_a_process_alone_too(one_process: Processes) -> None:
    assert_same_inside(one_process.run(same, "skips"))
