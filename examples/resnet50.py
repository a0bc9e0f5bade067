"""ResNet-50 as an `nn.Sequential` of its blocks, which needs no capture.

python examples/resnet50.py
rotor-plan examples/resnet50.py --mem-limit 520MB --fresh-grads --verify
"""

import torch
from torch import nn

from rotor_py import Checkpointable, models


def model():
    return models.resnet50(num_classes=10)


def sample(batch=16):
    return {"input": torch.randn(batch, 3, 96, 96)}


def loss(output):
    return nn.functional.cross_entropy(output, torch.arange(len(output), device=output.device) % 10)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


if __name__ == "__main__":
    network = model()
    steps = optimizer(network.parameters())
    network = Checkpointable(network, mem_limit="520MB", loss=loss, optimizer=steps, fresh_grads=True)
    for number in range(3):
        value = loss(network(**sample()))
        steps.zero_grad()
        value.backward()
        steps.step()
        print(f"step {number}: loss {value.item():.3f}")
    print(network.summary())
