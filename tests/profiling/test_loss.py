from __future__ import annotations

import pytest
import torch

from rotor_profiling import UnusableLossError, measure_loss
from tests.fields import raises
from tests.profiling.costs import CPU, UNIT, unit


def loss_cost(loss, value=None):
    return measure_loss(loss, unit() if value is None else value, device=CPU, output_bytes=UNIT)


def test_a_loss_that_needs_only_its_gradient() -> None:
    found = loss_cost(lambda y: y.sum())
    assert found.temp_bytes <= 16
    assert found.kept_bytes == 8  # the loss and the number that the backward starts with
    assert found.seconds > 0


def test_scratch_beyond_the_gradient_is_counted() -> None:
    found = loss_cost(lambda y: y.exp().exp().sum())
    assert 2 * UNIT <= found.temp_bytes <= 2 * UNIT + 16


def test_the_random_state_stays() -> None:
    value = unit()
    state = torch.get_rng_state()
    loss_cost(lambda y: torch.nn.functional.dropout(y, 0.5).sum(), value)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda y: y, "loss_not_a_number"),
        (lambda y: 3.0, "loss_not_a_number"),
        (lambda y: None, "loss_not_a_number"),
        (lambda y: y.detach().sum(), "no_gradient"),
    ],
)
def test_losses_that_cannot_be_trained_with_are_refused(loss, kind: str) -> None:
    with raises(UnusableLossError, kind):
        loss_cost(loss)


@pytest.mark.parametrize(
    "loss", [torch.nn.CrossEntropyLoss(), lambda output, target: output], ids=["module", "function"]
)
def test_a_loss_that_wants_a_target_is_refused_with_the_remedy(loss) -> None:
    with raises(UnusableLossError, "loss_signature"):
        loss_cost(loss)
