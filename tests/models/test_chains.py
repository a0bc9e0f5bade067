"""The networks are chains: plain nestings of `nn.Sequential`, whose layers can be stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rotor_py import models

NUMBER_OF_LAYERS = {
    "densenet121": 79, "densenet161": 99, "densenet169": 103, "densenet201": 119, "inception_v3": 32,
    "resnet18": 15, "resnet34": 23, "resnet50": 23, "resnet101": 40, "resnet152": 57,
    "resnet200": 73, "resnet1001": 339, "vgg11": 30, "vgg11_bn": 38, "vgg13": 34,
    "vgg13_bn": 44, "vgg16": 40, "vgg16_bn": 53, "vgg19": 46, "vgg19_bn": 62,
}  # fmt: skip


def layers(module: nn.Module) -> Iterator[nn.Module]:
    if type(module).forward is nn.Sequential.forward:
        for child in module.children():
            yield from layers(child)
    else:
        yield module


@pytest.mark.parametrize("name", [name for name in models.__all__ if name.islower()])
def test_network_is_a_plain_sequential_of_so_many_layers(network, name):
    model = network(name)
    assert isinstance(model, nn.Sequential)
    assert type(model).forward is nn.Sequential.forward
    assert len(list(layers(model))) == NUMBER_OF_LAYERS[name]


SMALL = {
    "basic": (lambda: models.ResNet(models.resnet.BasicBlock, (2, 1, 1, 1)), 32),
    "bottleneck": (lambda: models.ResNet(models.resnet.Bottleneck, (2, 1, 1, 1)), 32),
    "preact": (lambda: models.PreActResNet((2, 1, 1)), 8),
    "densenet": (lambda: models.DenseNet(4, (2, 2), 8, bn_size=2, drop_rate=0.5), 32),
    "inception": (lambda: models.inception_v3(transform_input=True, init_weights=False), 75),
}


@pytest.mark.parametrize("name", SMALL)
def test_only_relu_layers_write_into_their_input_and_every_parameter_gets_a_gradient(name):
    build, size = SMALL[name]
    model = build()
    value = image = torch.randn(2, 3, size, size)
    for layer in layers(copy.deepcopy(model)):
        version = value._version
        output = layer(value)
        assert isinstance(layer, nn.ReLU) or value._version == version
        value = output.detach()
    model(image).square().sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


def test_slices_are_plain_sequentials_that_share_the_layers_and_the_classifier_can_be_assigned():
    model = models.PreActResNet((1, 1, 1))
    body = model[:-3]
    assert type(body) is nn.Sequential
    assert list(dict(body.named_children())) == ["conv1", "layer1", "layer2", "layer3", "bn", "relu"]
    assert body[0] is model.conv1
    assert model[-1] is model.fc
    model.eval().fc = nn.Linear(256, 3)
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 3)
