"""Side by side with torchvision, where it is installed."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from rotor_py import models

pytest.importorskip("torchvision")

from torchvision.models import densenet, inception, resnet, vgg


def theirs(name: str) -> nn.Module:
    if name == "inception_v3":
        return inception.inception_v3(aux_logits=False, init_weights=True)
    module = {"r": resnet, "v": vgg, "d": densenet}[name[0]]
    return getattr(module, name)()


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "densenet121", "inception_v3", "vgg11_bn"])
def test_the_same_seed_gives_the_same_weights_and_the_same_step(name):
    torch.manual_seed(0)
    ours = getattr(models, name)()
    torch.manual_seed(0)
    other = theirs(name)
    state = other.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in ours.state_dict().items())
    image = torch.randn(2, 3, 75, 75)
    outputs = []
    for model in (ours, other):
        torch.manual_seed(1)
        outputs.append(model(image))
        outputs[-1].square().mean().backward()
    assert torch.equal(*outputs)
    gradients = dict(other.named_parameters())
    assert all(torch.equal(p.grad, gradients[key].grad) for key, p in ours.named_parameters())


@pytest.mark.parametrize("name", ["ResNet", "VGG", "DenseNet"])
def test_the_classes_take_the_same_arguments_in_the_same_order(name):
    module = {"ResNet": resnet, "VGG": vgg, "DenseNet": densenet}[name]
    parameters = [list(inspect.signature(c).parameters) for c in (getattr(models, name), getattr(module, name))]
    assert parameters[0] == parameters[1]
