"""Small networks of each kind on CUDA. On the CPU, the zoo of tests/execute has their layers."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, models
from rotor_py.models.resnet import BasicBlock
from tests.checkpointable.steps import between, square

NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "resnet": (lambda: models.ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10), (2, 3, 32, 32)),
    "inception_v3": (lambda: models.inception_v3(num_classes=10), (2, 3, 75, 75)),
}
NAMES = ["resnet", pytest.param("inception_v3", marks=pytest.mark.slow)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_cuda_the_peak_is_inside_the_limit_and_gradients_are_those_of_plain_training(cuda, name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    make, shape = NETWORKS[name]
    network, batch = make().to(cuda), torch.randn((8, *shape[1:]), device=cuda)
    plain = copy.deepcopy(network).cpu()
    planned = Checkpointable(network, batch, loss=square, fresh_grads=True)
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
