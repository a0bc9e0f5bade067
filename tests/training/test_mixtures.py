"""Which expert a token goes to is decided once, in the forward: a stage that is run again does not decide anew."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, CheckpointOptim
from rotor_py.execute import regions
from rotor_py.stage.replayed_routing import decided_bytes
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence
from tests.checkpointable.steps import Residual, step_peak
from tests.fields import raises
from tests.training.mixtures import CHOSEN, EXPERTS, WIDTH, Mixture, start_again

WAYS = ["topk", "sort", "argmax", "max", "sampled", "threshold", "rounded", "counted", "written", "shifted"]
AGAIN = "CF_0, Fn_1, Fn_2, L, CF_0, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"


def by_tape(layers: nn.Sequential, value: torch.Tensor) -> torch.Tensor:
    return CheckpointOptim.apply(list(layers), AGAIN, list("abc"), True, value)


def by_regions(layers: nn.Sequential, value: torch.Tensor) -> torch.Tensor:
    runners = [StageRunner(layer, name) for layer, name in zip(layers, "abc", strict=True)]
    return regions.run(runners, regions.regions(Sequence.parse(AGAIN)), value)


def gradients(layers: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    layers.zero_grad()
    torch.manual_seed(1)
    start_again()
    output = run(torch.randn(32, WIDTH))
    output.square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in layers.parameters() if p.grad is not None)]


@pytest.mark.parametrize("run", [by_tape, by_regions])
@pytest.mark.parametrize("how", WAYS)
def test_gradients_are_those_of_the_experts_that_the_forward_chose(how: str, run: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Mixture(how) for _ in range(3)))
    expected = gradients(layers, layers)
    for _ in range(2):  # what decides is known from the first time on
        found = gradients(layers, lambda value: run(layers, value))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", [nn.Sequential, Residual])  # a chain, and captured
def test_a_plan_keeps_what_was_decided_and_counts_it(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind(*(Mixture() for _ in range(4)))
    batch = torch.randn(64, WIDTH)
    planned = Checkpointable(model, batch)
    one = 64 * CHOSEN * (8 + 4)  # positions, and the numbers that were there
    assert planned.budget.snapshot_bytes >= 4 * one
    planned.compute_sequence(planned.budget.least_bytes())
    expected = gradients(model, model)
    assert all(map(torch.equal, gradients(model, planned), expected))
    assert "CF_" in str(planned.sequence)
    assert step_peak(planned, batch) <= planned.budget.peak_bytes(planned.sequence)


def test_a_stage_that_decides_nothing_is_not_watched_again() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.MaxPool1d(2))
    _, surroundings = StageRunner(layer, "layer").first(torch.randn(8, 4))
    assert surroundings.decisions == ()
    assert decided_bytes(layer) == 0


def test_a_stage_that_comes_to_another_decision_is_refused() -> None:
    class Turning(nn.Linear):
        runs = 0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            Turning.runs += 1
            kept = value.argmax(-1) if Turning.runs == 1 else value.argmin(-1)
            return super().forward(value) + kept[:, None]

    runner, value = StageRunner(Turning(EXPERTS, EXPERTS), "layer"), torch.randn(3, EXPERTS)
    _, surroundings = runner.first(value)
    with raises(RuntimeError, "rerun_differs"):
        runner.again(value, surroundings)
