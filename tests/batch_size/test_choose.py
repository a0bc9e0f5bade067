"""`largest_batch` and `best_batch` on real models: against measuring every batch."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError, UnsupportedModelError, best_batch, estimate, largest_batch
from rotor_py.batch_size.measured_batches import MeasuredBatches
from rotor_py.estimation.device_table import find_device
from rotor_py.validate.verification import default_loss
from rotor_solver import store_all
from tests.checkpointable.steps import Made, Residual, same_gradients
from tests.fields import raises


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8)


def convolutions() -> nn.Module:
    """With batch norms, whose statistics move, and a smaller input than outputs."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6)) for i in range(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(6 * 64, 10))


class Masked(Made):
    """Attention under a mask of the batch's shape: TorchDynamo captures it."""

    def forward(self, x: torch.Tensor, *, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = torch.ones(len(x), 12, 12, dtype=torch.bool).tril()
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, dim=-1)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return {"loss": nn.functional.mse_loss(x, labels)}


def masked() -> nn.Module:
    return Masked(layers=nn.ModuleList(nn.Linear(16, 48) for _ in range(2)))


def sequences(batch: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 12, 16), "labels": torch.randn(batch, 12, 16)}


def needs(model: nn.Module, sample_of: Callable[[int], Any], batch: int, **options: Any) -> tuple[int, int]:
    network = Checkpointable(model, sample_of(batch), loss=default_loss, **options)
    return network.budget.least_bytes(), network.budget.peak_bytes(store_all(network.budget.chain))


@pytest.mark.parametrize(
    ("make", "sample_of"), [(convolutions, images), pytest.param(masked, sequences, marks=pytest.mark.slow)]
)
def test_the_largest_is_what_measuring_every_batch_finds(make, sample_of):
    model = make()
    options = {"optimizer": torch.optim.Adam(model.parameters()), "fresh_grads": True}
    every = {batch: needs(model, sample_of, batch, **options) for batch in range(2, 6)}
    for limit in (every[4][0], every[4][0] - 1):
        found = largest_batch(model, sample_of, limit, **options)
        assert found.batch == found.largest == max(batch for batch in every if every[batch][0] <= limit)
        stored = [batch for batch in every if every[batch][1] <= limit]
        assert found.largest_stored == (max(stored) if stored else None)
        assert found.beyond == found.batch + 1
        assert limit < found.beyond_bytes <= every[found.batch + 1][0]
        assert found.measured_peak_bytes <= limit
        assert found.network.budget.least_bytes() == every[found.batch][0]


def assert_plain_gradients(found: Any, plain: nn.Module, batch: torch.Tensor, model: nn.Module) -> None:
    default_loss(found.network(batch)).backward()
    default_loss(plain(batch)).backward()
    assert same_gradients(model, plain)


def test_the_best_batch_is_as_fast_as_the_two_largest_in_real_steps_and_its_network_trains_inside_the_limit():
    model, plain = convolutions(), convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = needs(model, images, 12, optimizer=optimizer)[0]
    before, state = [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()
    found = best_batch(model, images, limit, optimizer=optimizer, multiple=2)
    assert all(map(torch.equal, before, model.state_dict().values())), "choosing changes nothing"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.batch % 2 == 0
    assert found.largest == 12
    assert found.optimizer_seconds > 0
    assert found.gap >= 0
    rates = dict(found.measured_per_second)
    assert {found.batch, found.largest, found.largest_stored} <= rates.keys()
    assert rates[found.batch] == max(rates.values())
    assert found.measured_peak_bytes <= limit
    assert [point.batch for point in found.points if point.stored_per_second is not None][-1] == found.largest_stored
    assert "samples a second" in str(found)
    torch.set_rng_state(state)
    assert_plain_gradients(found, plain, images(found.batch), model)


def test_batches_whose_activations_move_are_as_large_and_take_less_time(tmp_path, fast_link):
    def rows(batch: int) -> torch.Tensor:
        return torch.randn(16 * batch, 64)

    torch.manual_seed(0)
    wide = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
    model, plain = (nn.Sequential(*(Residual(*copy.deepcopy(wide)) for _ in range(3))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    options = {"loss": default_loss, "fresh_grads": True}
    limit = needs(model, rows, 12, fresh_grads=True)[0] + 1000
    alone, moving = (largest_batch(model, rows, limit, **options, offload=o) for o in (None, f"file:{tmp_path}"))
    assert moving.batch == alone.batch >= 12
    assert moving.overhead < alone.overhead
    assert moving.measured_peak_bytes <= limit
    assert moving.network.sequence.moves is not None
    assert_plain_gradients(moving, plain, rows(moving.batch), model)
    assert list(tmp_path.iterdir()) == []


def test_accumulation_keeps_the_effective_batch():
    model = convolutions()
    limit = needs(model, images, 9)[0]
    found = largest_batch(model, images, limit, effective_batch=28)
    assert (found.batch, found.accumulation_steps) == (7, 4)
    assert found.beyond == 14
    assert "after 4 batches of 7: 28 samples" in str(found)


def test_a_step_that_takes_more_than_was_predicted_makes_the_batch_smaller(monkeypatch):
    step_peak = MeasuredBatches.step_peak

    def hoarded(batches: MeasuredBatches, batch: int) -> int | None:
        return step_peak(batches, batch) + (limit if batch >= 6 else 0)

    model = convolutions()
    limit = needs(model, images, 7)[0] + 100
    monkeypatch.setattr(MeasuredBatches, "step_peak", hoarded)
    found = best_batch(model, images, limit)
    assert found.batch <= found.largest == 5
    assert (found.beyond, found.beyond_measured) == (6, True)
    assert found.beyond_bytes > limit


def test_a_batch_of_one_is_chosen_where_two_do_not_fit_unless_it_does_not_fit_or_the_model_refuses_it():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4), nn.ReLU())
    limit = needs(model, images, 2)[0] - 1
    found = largest_batch(model, images, limit)
    assert (found.batch, found.beyond, found.beyond_measured) == (1, 2, True)
    with raises(InfeasibleError, "no_batch_fits") as error:
        largest_batch(model, images, limit // 3)
    assert error.value.mem_limit == limit // 3
    with raises(InfeasibleError, "no_batch_fits"):
        best_batch(model, images, limit, multiple=8)
    normed = nn.Sequential(model, nn.Linear(4, 4), nn.BatchNorm1d(4))
    with raises(InfeasibleError, "no_batch_fits"):
        largest_batch(normed, images, needs(normed, images, 2)[0] - 1)


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        ({"multiple": 0}, "not_a_count", "multiple"),
        ({"multiple": 8, "effective_batch": 20}, "not_divisible", "effective_batch"),
        ({"multiple": 8, "most": 4}, "no_batch", "multiple"),
        ({"fresh_grads": True, "effective_batch": 8}, "excluded_together", "fresh_grads"),
        ({"compile": True}, "excluded", "compile"),
        ({"level": 2}, "excluded", "level"),
        ({"step_in_backward": torch.optim.SGD([torch.ones(1)])}, "excluded", "step_in_backward"),
        ({"mem_limit": "4 apples"}, "unknown_unit", "apples"),
        ({"mem_limit": "4MB", "autocast": torch.bfloat16}, "device_elsewhere", "autocast"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(options, kind, name):
    def never(batch: int) -> torch.Tensor:
        raise AssertionError

    with raises(ValueError, kind, name=name):
        best_batch(nn.Sequential(nn.Linear(2, 2)), never, **options)


def test_no_batch_is_asked_about_beyond_the_most_samples_have_to_grow_with_it_and_editors_show_the_arguments() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    found = largest_batch(model, lambda batch: torch.randn(batch, 4), "1GB", most=100)
    assert (found.batch, found.largest_stored, found.beyond) == (100, 100, None)
    assert "No batch larger than 100 was a candidate." in str(found)
    with raises(UnsupportedModelError, "sample_ignores_batch"):
        largest_batch(model, lambda batch: torch.randn(8, 4), "1GB")
    shown = inspect.signature(largest_batch)
    assert shown == inspect.signature(best_batch)
    assert [*shown.parameters][:4] == ["model", "sample_of", "mem_limit", "loss"]
    with pytest.raises(TypeError, match="sample_of"):
        best_batch(nn.Linear(1, 1))


LIMIT = "22MB"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))


def sample_of(batch: int) -> torch.Tensor:
    return torch.empty(batch, 128)


def estimated(batch: int) -> Any:
    return estimate(model, sample_of(batch), "l4", optimizer=torch.optim.AdamW, loss=torch.mean, mem_limit=LIMIT)


@pytest.mark.slow
def test_one_more_sample_than_the_largest_batch_finds_no_plan_and_autocast_makes_room_for_more() -> None:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    told: dict[str, Any] = {"optimizer": optimizer, "loss": torch.mean, "device": "l4"}
    found = largest_batch(network, sample_of, LIMIT, **told)
    assert estimated(found.batch).peak_bytes <= 22_000_000
    with pytest.raises(InfeasibleError):
        estimated(found.batch + 1)
    assert found.optimizer_seconds > 0
    # It is told as what it is, and the model is left alone.
    assert found.predicted
    assert found.measured_peak_bytes is None
    assert not any(point.measured for point in found.points)
    assert "predicted" in str(found)
    assert "real step" not in str(found)
    cast = best_batch(network, sample_of, LIMIT, multiple=16, autocast=torch.bfloat16, **told)
    assert cast.batch % 16 == 0
    assert cast.largest > found.batch
    assert not cast.measured_per_second
    assert not optimizer.state
    assert all(each.grad is None for each in network.parameters())


@pytest.mark.slow
def test_without_a_limit_the_allocator_has_room_for_what_it_reserves() -> None:
    small = replace(find_device("l4"), memory_bytes=700_000_000)
    found = largest_batch(model(), sample_of, loss=torch.mean, device=small, most=10**6)
    assert found.mem_limit <= int(0.9 * small.usable_bytes)
    report = estimate(model, sample_of(found.batch), small, loss=torch.mean, mem_limit=found.mem_limit)
    assert not report.reserved.missing_bytes
