"""Whole planned steps on a CUDA device: the numbers of plain training, inside the limit, by each kind of plan."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable
from tests.capture.steps import adamw
from tests.checkpointable.steps import Stack, between, square
from tests.stage.test_kept_steps import stored_by
from tests.training.stepping import Block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

SHARES = [0.0, 0.3, 0.7]


@pytest.fixture(autouse=True)
def the_same_sums_every_time() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = before


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def captured() -> tuple[nn.Module, torch.Tensor]:
    return Stack(*(Block(256) for _ in range(6))), torch.randn(4096, 256)


def chain() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(4096, 512)


def images() -> tuple[nn.Module, torch.Tensor]:
    """Indices of max pooling, masks of dropout and of ReLU: what is packed without loss."""

    def block(inside: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)]

    return nn.Sequential(*block(3, 32), *block(32, 32), *block(32, 32), nn.Flatten()), torch.randn(64, 3, 64, 64)


MODELS = pytest.mark.parametrize("make", [chain, captured, images])


def made(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = make()
    return model.to(device()), batch.to(device())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> list[int]:
    """The measured peaks of three steps, which free their gradients."""

    def step() -> None:
        square(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    peaks = []
    for seed in range(3):
        torch.manual_seed(seed)
        state = tensors_in([list(each.values()) for each in optimizer.state.values()])
        present = [*model.parameters(), *model.buffers(), *state, batch]
        peaks.append(measured_peak(step, present, device()))
    return peaks


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[each] for group in optimizer.param_groups for each in group["params"]]
    state = [state[name] for state in states for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    return [each.detach().to("cpu", copy=True) for each in [*model.parameters(), *model.buffers(), *state]]


def assert_trains_the_same(make, share, *, step_in_backward=False, plan=Checkpointable.compute_sequence, **options):
    """Three steps by a plan, beside plain ones. `options` with "adamw_" are those of the optimizer."""
    of_adamw = {name.removeprefix("adamw_"): options.pop(name) for name in list(options) if name.startswith("adamw_")}
    model, batch = made(make)
    plain = copy.deepcopy(model)
    optimizer = adamw(plain, **of_adamw)
    train(plain, optimizer, batch)
    expected = numbers(plain, optimizer)
    del plain, optimizer  # its memory is given back
    torch.cuda.empty_cache()
    optimizer = adamw(model, **of_adamw)
    steps = {"step_in_backward" if step_in_backward else "optimizer": optimizer}
    planned = Checkpointable(model, batch, loss=square, fresh_grads=True, watch=False, cache=False, **steps, **options)
    limit = between(planned, share)
    plan(planned, limit)
    peaks = train(planned, optimizer, batch)
    found = numbers(planned, optimizer)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    predicted = planned.budget.peak_bytes(planned.sequence)
    assert max(peaks) <= limit
    assert 0.9 * predicted <= max(peaks[1:]) <= predicted  # once the optimizer has its state
    return planned


@pytest.mark.parametrize("share", SHARES)
@MODELS
def test_planned_steps(make: Any, share: float) -> None:
    assert_trains_the_same(make, share)


def test_masks_and_indices_that_a_plan_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))  # any clock
    packed: list[int] = []

    def plan(planned: Checkpointable, limit: int) -> None:
        packed.append(stored_by(planned, lambda name: name.endswith("packed"), limit))

    assert_trains_the_same(images, 1.0, plan=plan)
    assert packed[0] >= 3


@pytest.mark.parametrize("adamw_kind", ["fused", "foreach"])
@pytest.mark.parametrize("make", [chain, captured])
def test_parameters_that_the_backward_steps(make: Any, adamw_kind: str) -> None:
    planned = assert_trains_the_same(make, 0.3, step_in_backward=True, **{f"adamw_{adamw_kind}": True})
    assert all(each.grad is None for each in planned.parameters())


@pytest.mark.parametrize("make", [chain, captured])
def test_activations_that_wait_in_the_host(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link so fast, as is said, that moving pays: so something moves."""
    monkeypatch.setattr("rotor_py.offload.open_tier.measure_bandwidth", lambda *_: 1e13)
    planned = assert_trains_the_same(make, 0.3, offload="host")
    assert planned.sequence.moves is not None
