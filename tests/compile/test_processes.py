"""Compiled stages in processes that train together: what stands between two hooks of FSDP, and inside of DDP."""

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rotor_py import Checkpointable
from rotor_py.compile.stage_code import Compile
from rotor_solver import recompute_all, store_all
from tests.compile.network import Compilations, Net, batch, gradients, loss, same, stage_by_stage
from tests.distributed.fsdp_models import batches, made
from tests.distributed.fsdp_models import loss as fsdp_loss
from tests.distributed.processes import Processes, here
from tests.distributed.steps import Numbers, adam, between, different, measured_peak_of, trained

pytestmark = pytest.mark.slow  # two processes, each of which compiles
KIND = "skips in parts"


def planned(rank: int, compile: Compile) -> tuple[Checkpointable, Optimizer]:
    """A model all of whose stages run compiled that can be: which are faster so is a matter of times."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model, value = made(KIND, "plain"), here(batches(KIND, rank, 1)[0])
    optimizer = adam(model)
    found = Checkpointable(model, value, loss=fsdp_loss, optimizer=optimizer, compile=compile, watch=False)
    plan = found._planner.in_use
    plan.turn_to(plan.ways[-2])
    plan.ways = (plan.ways[-2],)
    return found, optimizer


def same_as_stored(rank: int) -> str:
    """Three steps inside a limit halfway from the least to storing all, beside steps that store all."""
    given, eager, compile = batches(KIND, rank, 3), made(KIND, "plain"), {"fallback_random": True}
    close = trained(eager, adam(eager), given, fsdp_loss, seed=rank)
    stored, optimizer = planned(rank, compile)
    stored.sequence = stored._planner.in_use.agreed = store_all(stored.chain)  # the same in all processes
    expected = trained(stored, optimizer, given, fsdp_loss, seed=rank)
    found, optimizer = planned(rank, compile)
    limit = between(found, 0.5)
    sequence = found.compute_sequence(limit)
    numbers = trained(found, optimizer, given, fsdp_loss, seed=rank)
    predicted = found.budget.peak_bytes(sequence)
    assert measured_peak_of(found, optimizer, given[:1], fsdp_loss, predicted) <= predicted <= limit
    assert found.sequence is sequence
    assert different(numbers, expected) == far(numbers, close) == []
    assert found.compiled == found.names
    return str(sequence)


def far(numbers: Numbers, expected: Numbers) -> list[str]:
    """Of the first step: later ones go their own ways."""
    first = [name for name in expected if name.startswith(("loss 0", "gradient 0"))]
    return [name for name in first if not torch.allclose(numbers[name], expected[name], rtol=1e-3, atol=1e-5)]


def failing_in_one(rank: int) -> tuple[list[str], list[str]]:
    """The stages that are compiled, and all of them, where one process can compile no more than its first kinds."""
    with pytest.MonkeyPatch.context() as patch:
        Compilations(patch, failing=range(2, 100) if rank == 0 else range(0))
        found, _ = planned(rank, True)
    fsdp_loss(found(**here(batches(KIND, rank, 1)[0]))).backward()
    return found.compiled, found.names


def test_numbers_of_fully_shard_are_those_of_the_compiled_step_that_stores_everything(two_processes: Processes) -> None:
    (sequence,) = set(two_processes.run(same_as_stored))
    assert "CF_" in sequence


def test_stages_that_one_process_cannot_compile_run_plain_in_all(two_processes: Processes) -> None:
    found, other = two_processes.run(failing_in_one)
    assert found == other
    assert 0 < len(found[0]) < len(found[1])


def train(rank: int) -> tuple[list[str], str, list[torch.Tensor]]:
    """The compiled stages and the sequence of a step by the planner's choice, and the gradients of one that recomputes
    all, which are those of one that stores all.
    """
    torch.manual_seed(0)
    with stage_by_stage():
        found = Checkpointable(Net(), batch(), "1GB", compile=True, loss=loss, fresh_grads=True, granularity=4)
    model = DistributedDataParallel(found)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(5 + rank)
        loss(model(batch() + rank)).backward()
        return gradients(found.model)

    step()  # agrees with the other process
    step()
    chosen, sequence = found.compiled, str(found.sequence)
    plan = found._planner.in_use
    plan.turn_to(plan.ways[-2])
    steps = []
    for each in (store_all(found.chain), recompute_all(found.chain)):
        found.sequence = plan.agreed = each
        before = {name: buffer.clone() for name, buffer in found.model.named_buffers()}
        steps.append(step())
        assert found.sequence is each
        for name, buffer in found.model.named_buffers():
            buffer.copy_(before[name])
    assert same(*steps)
    assert found.compiled
    return chosen, sequence, steps[-1]


def test_processes_of_distributed_data_parallel_run_the_same_stages_compiled_by_one_sequence(two_processes) -> None:
    (chosen, sequence, made), other = two_processes.run(train)
    assert other[:2] == (chosen, sequence)
    assert same(made, other[2])  # averaged
