"""DistributedDataParallel around a plan and inside one: what every process does, and what is looked at."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_py import Checkpointable, largest_batch
from rotor_py.integrations.in_place import InPlace
from rotor_py.stage.error_context import watched
from rotor_solver import store_all
from tests.distributed import steps
from tests.distributed.processes import NOT_WHOLE, Processes, device, here, least_peak, present_bytes
from tests.distributed.steps import Numbers

F = nn.functional


def chain() -> nn.Module:
    layers = [each for _ in range(3) for each in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(64, 8))


class Residual(nn.Module):
    """No chain of modules: residuals, dropout, a keyword argument, one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(5))

    def forward(self, input: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        value = self.embed(input)
        for block in self.blocks:
            value = value + F.dropout(block(value), 0.1, self.training) * scale
        return F.linear(value, self.embed.weight)


class Partly(nn.Linear):
    """A layer with a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.unused = nn.Parameter(torch.ones(3))


MODELS = {
    "chain": chain,
    "captured": Residual,
    "partly chain": lambda: nn.Sequential(*(nn.Sequential(Partly(), nn.Tanh()) for _ in range(4))),
}
BATCH = 256


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().train()


def batches(rank: int, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator("cpu").manual_seed(1000 + rank)
    return [{"input": torch.randn(BATCH, 64, generator=generator, device="cpu")} for _ in range(count)]


def halfway(rank: int, kind: str) -> int:
    """A limit for which something has to be computed twice, gradient buckets counted, `present_bytes` not."""
    probe = Checkpointable(made(kind), here(batches(0, 1)[0]), loss=loss)
    budget = replace(probe.budget, fixed=replace(probe.budget.fixed, other=0))
    whole = (budget.least_bytes() + budget.peak_bytes(store_all(budget.chain))) // 2
    return whole + sum(p.numel() * p.element_size() for p in probe.parameters())


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.logsumexp(-1).square().mean()


def wrapped(model: nn.Module, order: str, limit: int | None, **options: Any) -> nn.Module:
    """DistributedDataParallel, "outside" or "inside" a plan, or with the model planned "in place", as by a trainer."""
    if order == "outside":
        return DistributedDataParallel(Checkpointable(model, mem_limit=limit, loss=loss), **options)
    ddp = DistributedDataParallel(model, **options)
    if order == "in place":
        InPlace(limit, {"loss": loss}).plan(model)
        return ddp
    return ddp if order == "plain" else Checkpointable(ddp, mem_limit=limit, loss=loss)


def planned_part(model: nn.Module) -> Checkpointable:
    found = model if isinstance(model, Checkpointable) else model.module
    found = getattr(found.forward, "planned", found)
    assert isinstance(found, Checkpointable)
    return found


def trained(rank, kind, order: str, limit: int | None, accumulated=1, **options: Any) -> tuple[nn.Module, Numbers]:
    before = present_bytes()
    torch.manual_seed(rank)
    model = wrapped(made(kind), order, None if limit is None else limit + before, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, steps.trained(model, optimizer, batches(rank, 3 * accumulated), loss, accumulated, seed=rank)


def same_as_plain(rank, kind, order: str, limit: int, accumulated: int, options: Any) -> tuple[str, list[str]]:
    """The sequence, and the names of numbers that are not those of plain training."""
    expected = trained(rank, kind, "plain", None, accumulated, **options)[1]
    model, found = trained(rank, kind, order, limit, accumulated, **options)
    return str(planned_part(model).sequence), steps.different(found, expected)


def peaks(rank: int, kind: str, order: str, limits: list[int]) -> tuple[str, int, int]:
    """The sequence, and the predicted and the measured peak of a step, beyond what is there before."""
    before = present_bytes()
    model = trained(rank, kind, order, limits[rank])[0]
    present_bytes()  # the optimizer's state is counted below, and is to be gone
    planned = planned_part(model)
    batch = here(batches(rank, 1)[0])
    model.zero_grad(set_to_none=False)
    present = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *batch.values()]
    # The optimizer is gone, and buckets are not among the tensors of DistributedDataParallel.
    held = planned.budget.fixed.optimizer
    if device().type == "cpu":
        held += planned.budget.fixed.communication
    predicted = planned.budget.peak_bytes(planned.sequence)
    measured = least_peak(lambda: steps.backward(model, [batch], loss), present, limits[rank] - held) + held
    return str(planned.sequence), predicted - before, measured - before


def bucket_bytes(rank: int, order: str) -> tuple[int, int]:
    """The bytes that a plan has for communication, and those of all gradients."""
    model = trained(rank, "chain", order, halfway(rank, "chain"))[0]
    budget = planned_part(model).budget
    return budget.fixed.communication, sum(each.nbytes for each in model.parameters())


def in_turn(rank: int, kind: str) -> tuple[list[str], list[str], list[int]]:
    """Steps with and without a gradient for the input, in turn: sequences, stages measured, steps that differ."""
    planned, measured = Checkpointable(made(kind), loss=loss), list[str]()
    inputs = [here(each["input"]) for each in batches(rank, 4)]
    for batch, gradient in zip(inputs, (True, False), strict=False):
        planned.measure(batch.detach().requires_grad_(gradient))
        planned.mem_limit = max(planned.mem_limit or 0, planned.budget.least_bytes())
    planned.mem_limit += 2 * sum(p.nbytes for p in planned.parameters())  # buckets
    planned.progress = lambda done, count, name: measured.append(name)
    networks = [DistributedDataParallel(network) for network in (planned, made(kind))]
    sequences, different = [], []
    for step, batch in enumerate(inputs):
        found = []
        for network in networks:
            torch.manual_seed(rank)
            value = batch.detach().requires_grad_(step % 2 == 0)
            network.zero_grad()
            loss(network(value)).backward()
            found.append([value.grad, *(p.grad for p in network.parameters())])
        sequences.append(str(planned.sequence))
        if not all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True)):
            different.append(step)
    return sequences, measured, different


def refusal(rank: int, kind: str, limits: list[int]) -> str:
    with pytest.raises(ValueError) as caught:
        trained(rank, kind, "outside", limits[rank] - present_bytes())
    return f"{type(caught.value).__name__}: {caught.value}"


def order_of_events(rank: int, kind: str) -> list[str]:
    """Buckets sent, and stages run again, in the order of a backward."""
    # By hand: a plan for a limit may store stages in part and run none of them again, which is a matter of times.
    model = DistributedDataParallel(Checkpointable(made(kind), every_n_layers=2, loss=loss), bucket_cap_mb=0.02)
    events: list[str] = []

    def send(state: None, bucket: Any) -> Any:
        events.append("bucket")
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    send.__annotations__.clear()  # it is looked at, and must not be a text
    model.register_comm_hook(None, send)  # type: ignore[operator] # a method of DistributedDataParallel
    batch = here(batches(rank, 1)[0])
    loss(model(**batch)).backward()  # buckets are made anew after the first
    output = model(**batch)
    events.clear()
    with watched(lambda doing, name, begins: events.append(name) if begins and doing == "recomputation" else None):
        loss(output).backward()
    return events


@cache
def limit_of(processes: Processes, kind: str) -> int:
    return processes.run(halfway, kind)[0]


CROSSED = [("chain", "inside"), ("captured", "outside")]
"""Each order and each kind of model once."""


@pytest.mark.parametrize(
    ("kind", "order", "accumulated", "options"),
    [
        ("chain", "inside", 1, {}),
        pytest.param("captured", "outside", 1, {}, marks=pytest.mark.slow),
        ("captured", "in place", 1, {}),
        ("chain", "outside", 2, {"gradient_as_bucket_view": True}),  # accumulated without being sent
        ("captured", "inside", 1, {"static_graph": True}),
        ("partly chain", "outside", 1, {"find_unused_parameters": True}),
    ],
    ids=str,
)
def test_numbers_are_those_of_plain_training_by_one_sequence(processes, kind, order, accumulated, options) -> None:
    found = processes.run(same_as_plain, kind, order, limit_of(processes, kind), accumulated, options)
    assert [different for _, different in found] == [[]] * len(found)
    (sequence,) = {sequence for sequence, _ in found}
    assert re.search(NOT_WHOLE, sequence)


@pytest.mark.parametrize(("kind", "order"), CROSSED)
def test_the_plan_fits_the_smallest_of_different_limits(processes: Processes, kind: str, order: str) -> None:
    limit = limit_of(processes, kind)
    limits = [limit + 10**6] * len(processes.processes)
    limits[-1] = limit
    found = processes.run(peaks, kind, order, limits)
    assert len({sequence for sequence, _, _ in found}) == 1
    for (_, predicted, measured), own in zip(found, limits, strict=True):
        assert predicted <= own
        assert 0.98 * predicted <= measured <= own


def test_a_process_alone_has_buckets_as_well(one_process: Processes) -> None:
    for order in ("outside", "inside"):
        ((communication, gradients),) = one_process.run(bucket_bytes, order)
        assert communication == gradients > 0


def test_kinds_of_steps_that_were_measured_take_turns(processes: Processes) -> None:
    found = processes.run(in_turn, "captured")
    for sequences, measured, different in found:
        assert sequences == found[0][0]
        assert all(re.search(NOT_WHOLE, sequence) for sequence in sequences)
        assert (measured, different) == ([], [])


def test_a_limit_that_is_too_small_on_one_rank_is_refused_on_all(processes: Processes) -> None:
    limits = [10**9] * len(processes.processes)
    limits[-1] = 10**5  # in all, and not beside what is there already
    (said,) = set(processes.run(refusal, "chain", limits))
    who = "rank 0: " if len(limits) > 1 else ""
    # Beside what a CUDA device has, that is less than there is before anything is measured.
    assert re.match(rf"InfeasibleError: {who}(before measuring: )?a training step needs at least", said)


def test_gradients_are_sent_while_stages_are_still_run_again(processes: Processes) -> None:
    for events in processes.run(order_of_events, "captured"):
        assert events.count("bucket") > 2
        after_the_first = events[events.index("bucket") :]
        assert any(event != "bucket" for event in after_the_first), events


def sample_of(batch: int) -> torch.Tensor:
    return torch.randn(batch, 64, device=device())


def chosen(rank: int, more: list[int], batch: int) -> tuple[int, str, int | None, int, bool]:
    """The batch chosen with `more` bytes than `batch` needs, its sequence and peak; whether gradients are the same."""
    model = DistributedDataParallel(made("chain"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = Checkpointable(DistributedDataParallel(made("chain")), sample_of(batch)).budget.least_bytes() + more[rank]
    found = largest_batch(model, sample_of, limit, optimizer=optimizer)
    found.network(sample_of(found.batch) + rank).square().mean().backward()
    gradient = model.module[0].weight.grad
    others = [torch.empty_like(gradient) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, gradient)
    same = all(torch.equal(gradient, other) for other in others)
    return found.batch, str(found.network.sequence), found.measured_peak_bytes, limit, same


def test_all_processes_take_the_batch_that_fits_the_smallest_limit(processes: Processes) -> None:
    count = len(processes.processes)
    found = processes.run(chosen, [*range(0, (count - 1) * 100_000, 100_000), 50][::-1], 40)
    ((batch, sequence),) = {(batch, sequence) for batch, sequence, *_ in found}
    for _, _, peak, limit, same in found:
        assert peak <= limit
        assert same
    assert batch == 40
    assert "CF_" in sequence or "Fn_" in sequence
