"""The networks are chains: plain nestings of `nn.Sequential`, whose layers can be stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rotor_py import models
from tests.models.conftest import layers

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
