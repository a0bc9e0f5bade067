"""ResNet-18 on small images: `rotor-plan examples/resnet18.py --mem-limit 300MB`."""

import torch

from rotor_py.models import resnet18

model = resnet18(num_classes=100)


def sample(batch: int = 48) -> torch.Tensor:
    return torch.randn(batch, 3, 96, 96)


def loss(output: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(len(output), device=output.device) % 100
    return torch.nn.functional.cross_entropy(output, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
