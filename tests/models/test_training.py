"""Small networks of each kind by many sequences: optimizer steps bit for bit as plain training."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, models
from rotor_py.models.resnet import BasicBlock
from rotor_solver import recompute_all, solve
from tests.checkpointable.steps import between, square, step_peak
from tests.execute.sequences import any_sequence
from tests.execute.training import assert_same, cut_of, replayed, steps

NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "resnet": (lambda: models.ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10), (2, 3, 32, 32)),
    "inception_v3": (lambda: models.inception_v3(num_classes=10), (2, 3, 75, 75)),
}
NAMES = ["resnet", pytest.param("inception_v3", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", NAMES)
def test_steps_by_any_sequence_are_those_of_plain_training_and_the_measured_peak_is_as_predicted(name: str) -> None:
    make, shape = NETWORKS[name]
    plain, batch = make(), torch.randn(shape)
    planned = Checkpointable(copy.deepcopy(plain), loss=square, fresh_grads=True)
    planned.measure(batch)
    # Whole stages alone: whoever replays a sequence by hand has no names of other ways.
    chain = replace(planned.inspection_values, ways=()).chain(fresh_gradients=True)
    model = copy.deepcopy(plain)
    expected = steps(model, model, batch)
    limit = max(between(planned, 0.0), between(planned, 0.3))
    sequences = {recompute_all(chain), solve(chain, planned.budget.chain_limit(limit))}
    for sequence in sequences | {any_sequence(len(planned.names), random.Random(3))}:
        model = copy.deepcopy(plain)
        assert_same(steps(model, replayed(cut_of(model, batch), sequence), batch), expected)
    predicted = planned.budget.peak_bytes(planned.compute_sequence(between(planned, 0.3)))
    step_peak(planned, batch)
    assert 0.98 * predicted <= step_peak(planned, batch, fresh_grads=True) <= planned.mem_limit


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_cuda_the_peak_is_inside_the_limit_and_gradients_are_those_of_plain_training(cuda, name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    make, shape = NETWORKS[name]
    network, batch = make().to(cuda), torch.randn((8, *shape[1:]), device=cuda)
    plain = copy.deepcopy(network).cpu()
    planned = Checkpointable(network, loss=square, fresh_grads=True)
    planned.measure(batch)
    limit = between(planned, 0.4)
    planned.compute_sequence(limit)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats(cuda)
            square(model(batch)).backward()
            assert model is not planned or torch.cuda.max_memory_allocated(cuda) <= limit
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    found = gradients(planned)
    assert all(map(torch.equal, found, gradients(plain.to(cuda))))
