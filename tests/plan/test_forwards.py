"""Several forwards before a backward: where they do not fit together, a warning says so before the second begins."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from tests.checkpointable.steps import CPU, between

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it
ROWS = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


class Tower(nn.Module):
    """No chain: TorchDynamo captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return value


def chain() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": Tower}


def planned_at(share: float, kind: str = "chain") -> Checkpointable:
    planned = Checkpointable(MODELS[kind](), fresh_grads=True)
    planned.measure(ROWS)
    planned.compute_sequence(between(planned, share))
    return planned


def added_up(planned: Checkpointable) -> None:
    """Outputs are held to the end, as the prediction has it."""
    first, second = planned(ROWS), planned(2 * ROWS)
    (first.mean() + second.mean()).backward()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those about forwards. Gradients that are kept, or a graph, are told of as well."""
    found = [record.getMessage() for record in caplog.records if record.name == "rotor_py"]
    return [said for said in found if "in flight" in said]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_over_its_limit_is_warned_of_with_what_it_takes(
    kind: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    planned = planned_at(share, kind)
    added_up(planned)
    (said,) = warnings_of(caplog)
    assert said.startswith("2 forwards of ")
    assert f"({planned.mem_limit} bytes). Call backward()" in said
    predicted = int(re.findall(r"up to [^(]*\((\d+) bytes\)", said)[0])
    planned.zero_grad()
    present = [*planned.parameters(), ROWS]
    measured = measured_peak(lambda: added_up(planned), present, CPU)
    assert planned.mem_limit < predicted
    assert 0.9 * predicted <= measured <= predicted
    assert warnings_of(caplog) == [said]  # once


def test_more_at_once_than_before_are_warned_of_again(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_at(0.5)
    added_up(planned)
    sum(planned(ROWS).mean() for _ in range(3)).backward()
    added_up(planned)
    assert [said[0] for said in warnings_of(caplog)] == ["2", "3"]


def test_what_fits_together_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_at(0.5)
    planned.mem_limit = "1GB"
    added_up(planned)
    assert warnings_of(caplog) == []


def each_its_backward(planned: Checkpointable) -> None:
    for _ in range(3):
        planned(ROWS).mean().backward()


def outputs_kept(planned: Checkpointable) -> list[torch.Tensor]:
    outputs = []
    for _ in range(3):
        outputs.append(planned(ROWS))
        outputs[-1].mean().backward()
    return outputs


def dropped(planned: Checkpointable) -> None:
    planned(ROWS)
    gc.collect()
    planned(ROWS).mean().backward()


def without_gradients(planned: Checkpointable) -> torch.Tensor:
    with torch.no_grad():
        first = planned(ROWS)
    planned.eval()
    second = planned(ROWS)
    planned.train()
    planned(ROWS).mean().backward()
    return first + second.detach()


def retained(planned: Checkpointable) -> None:
    output = planned(ROWS)
    for _ in range(2):
        output.mean().backward(retain_graph=True)
    torch.autograd.grad(planned(ROWS).mean(), list(planned.parameters()))
    planned(ROWS).mean().backward()


@pytest.mark.parametrize("step", [each_its_backward, outputs_kept, dropped, without_gradients, retained])
def test_forwards_that_are_not_in_flight_do_not_count(
    step: Callable[[Checkpointable], object], caplog: pytest.LogCaptureFixture
) -> None:
    planned = planned_at(0.5)
    step(planned)
    assert warnings_of(caplog) == []


def test_a_strategy_by_hand_without_a_limit_is_never_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    planned = Checkpointable(chain(), every_n_layers=2)
    added_up(planned)
    assert warnings_of(caplog) == []
