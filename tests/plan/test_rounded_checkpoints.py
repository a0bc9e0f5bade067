"""Plans that keep checkpoints in fewer bits: only if asked for, where memory is tight, and inside the limit."""

from __future__ import annotations

import copy
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, PlanMismatchError, store_all
from rotor_py.measure.costliest import exact
from rotor_py.measure.measurement import Way
from rotor_py.report.sweeping import sweep_of
from rotor_py.trials.one_way import one_way_each
from rotor_py.trials.verification import verify
from rotor_solver import Chain, ForwardCheck, Persistent, Sequence
from rotor_solver.rounded.rounding import with_rounding
from tests.execute.sequences import persistent_sequence
from tests.execute.training import CPU

WIDTH = 64


class Slow(nn.Module):
    """Takes so long that it costs more to run it again than to round its input, whatever else the machine does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return x + self.down(self.up(x).tanh())  # type: ignore[no-any-return]  # a tensor


def slow() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Slow() for _ in range(14))), torch.randn(256, WIDTH)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)

    def block(inside: int) -> nn.Sequential:
        layers = nn.Conv2d(inside, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2)
        return nn.Sequential(*layers)

    head = nn.Flatten(), nn.Linear(8 * 256, 4)
    return nn.Sequential(block(3), block(8), block(8), nn.MaxPool2d(1), block(8), *head), torch.randn(8, 3, 16, 16)


class Skipping(nn.Module):
    """Is captured: a value goes past all stages in between, and others have views and indices beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = self.first(x).relu()
        value = begin
        for layer in self.inner:
            value = layer(value)
        return self.last(value + begin)  # type: ignore[no-any-return]  # a tensor


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + F.dropout(self.down(gate.sigmoid() * value), 0.1, self.training)


def skipping() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Skipping(), torch.randn(128, WIDTH)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output * output.sin()).mean()


def planned_for(made: tuple[nn.Module, torch.Tensor], keep: str | None = "bf16", **options: Any) -> Checkpointable:
    model, batch = made
    planned = Checkpointable(model, loss=loss_of, keep=keep, cache=False, **options)
    planned.measure(batch)
    return planned


def rounded_in(sequence: Sequence | None) -> list[int]:
    assert sequence is not None
    return [each.stage for each in sequence if isinstance(each, ForwardCheck) and each.rounded]


def chain_of(planned: Checkpointable) -> Chain:
    assert planned.chain is not None
    return planned.chain


def tight(planned: Checkpointable, share: float = 0.1) -> int:
    """A limit so far on the way from the least to storing everything."""
    budget = planned.budget
    assert budget is not None
    least = budget.least_bytes()
    return int(least + share * (budget.peak_bytes(store_all(budget.chain)) - least))


def step(network: nn.Module, batch: torch.Tensor, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, all gradients, and all buffers after the step."""
    network.zero_grad(set_to_none=False)
    torch.manual_seed(seed)
    loss = loss_of(network(batch))
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    gradients = torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None])
    buffers = [each.flatten().double() for each in network.buffers()]
    return loss.detach(), gradients, torch.cat([torch.zeros(1), *buffers])


def peak_of(planned: Checkpointable, batch: torch.Tensor) -> int:
    step(planned, batch)
    present = [*tensors_in(list(planned.parameters())), *planned.buffers(), batch]
    gradients = [each.grad for each in planned.parameters() if each.grad is not None]

    def train() -> None:
        output = planned(batch)  # held to the end of the step, as people do
        loss_of(output).backward()  # type: ignore[no-untyped-call]  # of torch

    return measured_peak(train, [*present, *gradients], CPU)


@pytest.fixture(scope="module")
def tightly() -> tuple[Checkpointable, nn.Module, torch.Tensor]:
    """A plan with rounded checkpoints, the plain model, and a batch."""
    model, batch = slow()
    plain = copy.deepcopy(model)
    planned = planned_for((model, batch))
    planned.compute_sequence(tight(planned))
    return planned, plain, batch


def test_among_plans_with_one_way_each_only_that_of_fewer_bits_rounds_them(
    tightly: tuple[Checkpointable, nn.Module, torch.Tensor],
) -> None:
    planned, *_ = tightly
    measured = planned.inspection_values
    assert measured is not None
    assert measured.rounded is not None
    assert planned.budget is not None
    packed = replace(measured, ways=tuple((Way("packed", cost),) for cost in measured.stages))
    chain, limit = packed.chain(fresh_gradients=False), planned.budget.chain_limit(tight(planned))
    found = {name: each.solve(chain, limit) for name, each in one_way_each(packed, 500).items()}
    assert [*found] == ["optimal, whole", "optimal, packed", "optimal, in bf16"]
    assert {name for name, sequence in found.items() if rounded_in(sequence)} == {"optimal, in bf16"}
    # Where no stage has another way, rounded checkpoints are in the best plan already.
    assert [*one_way_each(replace(measured, ways=()), 500)] == ["optimal, whole"]


def test_where_memory_is_tight_checkpoints_are_rounded_and_the_plan_is_faster(tightly: Any) -> None:
    planned, _, _ = tightly
    budget, limit = planned.budget, tight(planned)
    assert rounded_in(planned.sequence)
    assert budget.peak_bytes(planned.sequence) <= limit
    without = replace(budget, chain=exact(budget.chain))
    found = without.solve(limit, Persistent())
    seconds = budget.makespan(planned.sequence)
    assert seconds < 0.97 * without.makespan(found)
    assert planned.sequence.lower_bound <= seconds


def test_the_loss_is_exact_and_gradients_are_close_and_the_same_in_every_step(tightly: Any) -> None:
    planned, plain, batch = tightly
    (value, found, _), (again, same, _), (expected, gradients, _) = (
        step(network, batch) for network in (planned, planned, plain)
    )
    assert torch.equal(value, expected)
    assert torch.equal(again, expected)
    assert torch.equal(found, same)
    assert 0 < float((found - gradients).norm() / gradients.norm()) < 0.01


def test_the_measured_peak_is_inside_the_limit(tightly: Any) -> None:
    planned, _, batch = tightly
    predicted = planned.budget.peak_bytes(planned.sequence)
    assert 0.97 * predicted <= peak_of(planned, batch) <= predicted <= tight(planned)


def test_it_is_told_of(tightly: Any, tmp_path: Path) -> None:
    planned, _, _ = tightly
    said = " ".join(str(planned.report()).split())
    checkpoints = len(set(rounded_in(planned.sequence)))
    assert f"{checkpoints} checkpoints are kept in bf16" in said
    assert "checkpointed in bf16" in said
    planned.report().to_html(tmp_path / "page.html")
    assert "checkpointed in bf16" in (tmp_path / "page.html").read_text()


def test_a_plan_that_was_saved_rounds_only_if_that_is_asked_for_again(tightly: Any, tmp_path: Path) -> None:
    planned, plain, batch = tightly
    planned.save_plan(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == 11

    def loaded(**options: Any) -> Checkpointable:
        return Checkpointable(copy.deepcopy(plain), plan=tmp_path / "plan.json", **options)

    for other in (None, "int8"):
        with pytest.raises(PlanMismatchError, match="keep="):
            loaded(keep=other)
    again = loaded(keep="bf16")
    assert again.sequence == planned.sequence
    assert again.budget == planned.budget
    assert torch.equal(step(again, batch)[1], step(planned, batch)[1])


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("word", "fp4", "it has to have a word for fewer bits"),
        ("of_inputs", [], "rounded inputs of 0 stages, and 14 stages"),
        ("of_inputs", [None] * 14, "rounds a_"),
        ("of_inputs", [{"positions": [0]}] * 14, "it has to have positions, spared_bytes"),
    ],
)
def test_a_file_that_says_something_else_of_them_is_refused(
    tightly: Any, tmp_path: Path, part: str, value: Any, words: str
) -> None:
    planned, plain, _ = tightly
    path = tmp_path / "plan.json"
    planned.save_plan(path)
    data = json.loads(path.read_text())
    data["costs"]["rounded"][part] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=words):
        Checkpointable(plain, plan=path, keep="bf16")


def test_verifying_says_how_far_gradients_are(tightly: Any) -> None:
    planned, _, batch = tightly
    (found,) = verify(planned, batch, loss=loss_of)
    assert found.rounded is not None
    assert found.rounded.problem() is None
    assert 0 < found.rounded.gradient_error < 0.01


def test_nothing_is_rounded_without_the_word() -> None:
    planned = planned_for(slow(), keep=None)
    assert planned.inspection_values is not None
    assert planned.inspection_values.rounded is None
    assert not rounded_in(planned.compute_sequence(tight(planned)))
    assert all(stage.rounded is None for stage in chain_of(planned))
    planned.sequence = Sequence.parse(ROUNDED_BY_HAND)
    with pytest.raises(ValueError, match="give keep="):
        planned(slow()[1])


ROUNDED_BY_HAND = ", ".join(
    [
        "CF_0, CF_1~",
        *(f"Fe_{i}" for i in range(2, 14)),
        "L",
        *(f"B_{i}" for i in range(13, 1, -1)),
        "Fe_1, B_1, Fe_0, B_0",
    ]
)


@pytest.mark.parametrize("option", ["on_oom", "offload", "forwards_in_flight", "step_in_backward"])
def test_it_is_not_offered_beside(option: str, tmp_path: Path) -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.randn(64, 64)
    given = {
        "on_oom": "replan",
        "offload": f"file:{tmp_path}",
        "forwards_in_flight": 2,
        "step_in_backward": torch.optim.SGD(model.parameters(), 0.1),
    }
    planned = planned_for((model, batch), **{option: given[option]})
    assert planned.inspection_values is not None
    assert planned.inspection_values.rounded is None


@pytest.mark.parametrize(
    ("make", "word"), [(convolutions, "bf16"), (convolutions, "int8"), (skipping, "bf16"), (skipping, "fp8")]
)
def test_whatever_is_rounded_the_peak_is_predicted_and_only_gradients_differ(make: Any, word: str) -> None:
    model, batch = make()
    plain = copy.deepcopy(model)
    planned = planned_for((model, batch), keep=word)
    chain, budget = chain_of(planned), planned.budget
    assert budget is not None
    rounded = 0
    for seed in range(3):
        planned.sequence = with_rounding(chain, persistent_sequence(len(chain), random.Random(seed)))
        rounded += len(rounded_in(planned.sequence))
        planned.load_state_dict(copy.deepcopy(plain.state_dict()))
        predicted = budget.peak_bytes(planned.sequence)
        assert 0.9 * predicted <= peak_of(planned, batch) <= predicted
        planned.load_state_dict(copy.deepcopy(plain.state_dict()))
        found, expected = step(planned, batch), step(copy.deepcopy(plain), batch)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[2], expected[2])
        assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 0.2
    assert rounded


class Along(nn.Module):
    """Hands the begin on, beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, value: Any) -> Any:
        x, begin = value if isinstance(value, tuple) else (value, value + 1)
        return self.layer(x).tanh(), begin


def test_what_stages_hand_on_stays_as_it_is() -> None:
    planned = planned_for((nn.Sequential(*(Along() for _ in range(4)), Added()), torch.randn(64, 64)))
    assert planned.inspection_values is not None
    assert planned.inspection_values.rounded is not None
    borders = planned.inspection_values.rounded.of_inputs
    assert [None if border is None else border.positions for border in borders] == [None, *[(0,)] * 4]
    assert [border.spared_bytes for border in borders if border is not None] == [64 * 64 * 2] * 4


class Added(nn.Module):
    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return value[0] + value[1]


def test_the_limit_for_an_overhead_is_that_of_a_plan_with_rounded_checkpoints(tightly: Any) -> None:
    planned, _, _ = tightly
    facts = planned.report()
    overhead = facts.seconds_of(planned.sequence) / facts.store_all_seconds - 1 + 1e-6
    without = replace(planned.budget, chain=exact(planned.budget.chain))
    best = without.solve(tight(planned), Persistent())
    fresh = replace(facts, sequence=best)  # a sweep that knows of no rounded plan yet
    point = sweep_of(fresh, overhead=overhead).least_for(overhead)
    assert point.mem_limit <= 1.01 * planned.budget.peak_bytes(planned.sequence)
    assert rounded_in(point.sequence)
