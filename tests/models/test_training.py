"""Each family of networks, small, by many sequences: three optimizer steps bit for bit as plain training."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, models
from rotor_solver import Sequence, recompute_all, solve, store_all
from tests.checkpointable.steps import between, square, step_peak
from tests.execute.sequences import any_sequence
from tests.execute.training import assert_same, cut_of, replayed, steps


def vgg() -> nn.Sequential:
    """Without the two largest layers, whose 120 million weights say nothing about training."""
    features: nn.Sequential = models.vgg11_bn(num_classes=10).features
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10), nn.Dropout(0.5))


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "resnet18": (lambda: models.resnet18(num_classes=10), (2, 3, 32, 32)),
    "resnet50": (lambda: models.resnet50(num_classes=10), (2, 3, 32, 32)),
    "vgg11_bn": (lambda: vgg(), (2, 3, 32, 32)),
    "densenet121": (lambda: models.densenet121(num_classes=10), (2, 3, 32, 32)),
    "inception_v3": (lambda: models.inception_v3(num_classes=10, aux_logits=False), (2, 3, 96, 96)),
}


SLOW = ("densenet121", "inception_v3", "resnet50", "vgg11_bn")
"""They are as ResNet-18 is, deeper, and with more branches inside a stage or with none."""
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NETWORKS]


@cache
def measured(name: str) -> tuple[Checkpointable, nn.Sequential, torch.Tensor]:
    """A plan for the network, the network as it was before any step, and a batch."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    planned, batch = Checkpointable(model, loss=square, fresh_grads=True), torch.randn(shape)
    planned.measure(batch)
    return planned, plain, batch


@cache
def plain_steps(name: str) -> list[tuple[str, torch.Tensor]]:
    _, plain, batch = measured(name)
    model = copy.deepcopy(plain)
    return steps(model, model, batch)


def assert_trains_the_same(name: str, sequence: Sequence) -> None:
    _, plain, batch = measured(name)
    model = copy.deepcopy(plain)
    assert_same(steps(model, replayed(cut_of(model, batch), sequence), batch), plain_steps(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_ends_of_the_scale_and_limits_between_them(name: str) -> None:
    planned, *_ = measured(name)
    # Whole stages alone: whoever replays a sequence by hand has no names of other ways.
    chain = replace(planned.inspection_values, ways=()).chain(fresh_gradients=True)
    least = between(planned, 0.0)
    sequences = {store_all(chain)}
    if len(chain) < 30:
        sequences.add(recompute_all(chain))
    sequences.add(any_sequence(len(planned.names), random.Random(3)))
    for share in (0.1, 0.4, 0.8):
        sequences.add(solve(chain, planned.budget.chain_limit(max(least, between(planned, share)))))
    for sequence in sequences:
        assert_trains_the_same(name, sequence)


@pytest.mark.parametrize("name", NAMES)
def test_the_measured_peak_is_inside_the_limit_and_as_predicted(name: str) -> None:
    planned, _, batch = measured(name)
    for share in (0.1, 0.5):
        limit = between(planned, share)
        planned.compute_sequence(limit)
        predicted = planned.budget.peak_bytes(planned.sequence)
        step_peak(planned, batch)
        found = step_peak(planned, batch, fresh_grads=True)
        assert 0.98 * predicted <= found <= limit, share


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_on_cuda_the_peak_is_inside_the_limit_and_gradients_are_those_of_plain_training(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network, batch = make().to(device), torch.randn((8, *shape[1:]), device=device)
    plain = copy.deepcopy(network).cpu()
    planned = Checkpointable(network, loss=square, fresh_grads=True)
    planned.measure(batch)
    limit = between(planned, 0.4)
    planned.compute_sequence(limit)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats(device)
            square(model(batch)).backward()
            assert model is not planned or torch.cuda.max_memory_allocated(device) <= limit
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    found = gradients(planned)
    assert all(map(torch.equal, found, gradients(plain.to(device))))
