"""Outputs, gradients and statistics are those of the networks as torchvision writes them, bit for bit.

A twin has the same weights and a forward in the usual style: residuals as sums, dense blocks as growing lists, and
functions where the chain has layers.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotor_py import models
from rotor_py.models.resnet import BasicBlock, Bottleneck
from tests.models.conftest import layers, network

Forward = Callable[[nn.Module, Tensor], Tensor]


def step(model: nn.Module, forward: Forward, image: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    image = image.clone().requires_grad_()
    output = forward(model, image)
    output.square().sum().backward()
    gradients = {f"gradient of {key}": parameter.grad for key, parameter in model.named_parameters()}
    return {"output": output.detach(), "gradient of the image": image.grad, **gradients, **dict(model.named_buffers())}


def pooled(x: Tensor) -> Tensor:
    return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


def residual(block: nn.Module, x: Tensor) -> Tensor:
    out = F.relu(block.bn1(block.conv1(x)))
    out = block.bn2(block.conv2(out))
    if isinstance(block, Bottleneck):
        out = block.bn3(block.conv3(F.relu(out)))
    return F.relu(out + (x if block.downsample is None else block.downsample(x)))


def resnet_forward(model: nn.Module, x: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(model.bn1(model.conv1(x))), 3, 2, 1)
    for group in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in group:
            x = residual(block, x)
    return model.fc(pooled(x))


def preact_forward(model: nn.Module, x: Tensor) -> Tensor:
    x = model.conv1(x)
    for group in (model.layer1, model.layer2, model.layer3):
        for block in group:
            first = F.relu(block.bn1(x))
            out = block.conv2(F.relu(block.bn2(block.conv1(first))))
            out = block.conv3(F.relu(block.bn3(out)))
            x = out + (x if block.shortcut is None else block.shortcut(first))
    return model.fc(pooled(F.relu(model.bn(x))))


def vgg_forward(model: nn.Module, x: Tensor) -> Tensor:
    x = torch.flatten(F.adaptive_avg_pool2d(model.features(x), 7), 1)
    first, _, dropout, second, _, _, third = model.classifier
    x = F.dropout(F.relu(first(x)), dropout.p)
    return third(F.dropout(F.relu(second(x)), dropout.p))


def dense_block(block: nn.Module, x: Tensor, drop_rate: float) -> Tensor:
    maps = [x]
    for layer in block:
        new = layer.conv1(F.relu(layer.norm1(torch.cat(maps, 1))))
        new = layer.conv2(F.relu(layer.norm2(new)))
        maps.append(F.dropout(new, drop_rate) if drop_rate else new)
    return torch.cat(maps, 1)


def densenet_forward(model: nn.Module, x: Tensor, drop_rate: float = 0.0) -> Tensor:
    features = model.features
    x = F.max_pool2d(F.relu(features.norm0(features.conv0(x))), 3, 2, 1)
    x = dense_block(features.denseblock1, x, drop_rate)
    transition = features.transition1
    x = F.avg_pool2d(transition.conv(F.relu(transition.norm(x))), 2)
    x = dense_block(features.denseblock2, x, drop_rate)
    return model.classifier(pooled(F.relu(features.norm5(x))))


def unit(module: nn.Module, x: Tensor) -> Tensor:
    return F.relu(module.bn(module.conv(x)))


def through(block: nn.Module, branch: str, steps: str, x: Tensor) -> Tensor:
    for number in steps:
        x = unit(getattr(block, f"{branch}_{number}"), x)
    return x


def average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1)


def mixed_c(block: nn.Module, x: Tensor) -> list[Tensor]:
    one, single = unit(block.branch1x1, x), through(block, "branch7x7", "123", x)
    return [one, single, through(block, "branch7x7dbl", "12345", x), unit(block.branch_pool, average(x))]


def mixed_e(block: nn.Module, x: Tensor) -> list[Tensor]:
    one, single = unit(block.branch1x1, x), through(block, "branch3x3", "1", x)
    singles = torch.cat([unit(block.branch3x3_2a, single), unit(block.branch3x3_2b, single)], 1)
    double = through(block, "branch3x3dbl", "12", x)
    doubles = torch.cat([unit(block.branch3x3dbl_3a, double), unit(block.branch3x3dbl_3b, double)], 1)
    return [one, singles, doubles, unit(block.branch_pool, average(x))]


MIXED: dict[str, Callable[[nn.Module, Tensor], list[Tensor]]] = {
    "5b 5c 5d": lambda block, x: [
        unit(block.branch1x1, x), through(block, "branch5x5", "12", x), through(block, "branch3x3dbl", "123", x),
        unit(block.branch_pool, average(x)),
    ],
    "6a": lambda block, x: [
        unit(block.branch3x3, x), through(block, "branch3x3dbl", "123", x), F.max_pool2d(x, 3, 2),
    ],
    "6b 6c 6d 6e": mixed_c,
    "7a": lambda block, x: [
        through(block, "branch3x3", "12", x), through(block, "branch7x7x3", "1234", x), F.max_pool2d(x, 3, 2),
    ],
    "7b 7c": mixed_e,
}  # fmt: skip


def inception_forward(model: nn.Module, x: Tensor) -> Tensor:
    x = unit(model.Conv2d_2b_3x3, unit(model.Conv2d_2a_3x3, unit(model.Conv2d_1a_3x3, x)))
    x = unit(model.Conv2d_4a_3x3, unit(model.Conv2d_3b_1x1, F.max_pool2d(x, 3, 2)))
    x = F.max_pool2d(x, 3, 2)
    for places, branches in MIXED.items():
        for place in places.split():
            x = torch.cat(branches(getattr(model, f"Mixed_{place}"), x), 1)
    return model.fc(torch.flatten(F.dropout(F.adaptive_avg_pool2d(x, 1), model.dropout.p), 1))


def small_vgg(constructor: Callable[..., nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = constructor(init_weights=False)
        for place, sizes in enumerate([(25088, 8), (8, 8), (8, 5)]):  # the real ones take half a gigabyte
            model.classifier[3 * place] = nn.Linear(*sizes)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    return model


small_densenet = partial(models.DenseNet, 4, (3, 2), 8, bn_size=2)
RESNETS = [
    (BasicBlock, {}),
    (Bottleneck, {"groups": 4, "width_per_group": 8}),
    (Bottleneck, {"replace_stride_with_dilation": (False, True, True)}),
    (Bottleneck, {"norm_layer": lambda channels: nn.GroupNorm(4, channels)}),
]


@pytest.mark.parametrize(
    ("make", "forward", "size"),
    [
        *((partial(models.ResNet, block, (2, 1, 2, 1), **options), resnet_forward, 32) for block, options in RESNETS),
        (lambda: models.PreActResNet((2, 2, 1)), preact_forward, 16),
        *((partial(small_vgg, each), vgg_forward, 32) for each in (models.vgg11, models.vgg11_bn)),
        (small_densenet, densenet_forward, 32),
        (partial(small_densenet, drop_rate=0.3), partial(densenet_forward, drop_rate=0.3), 32),
        (partial(models.inception_v3, init_weights=False), inception_forward, 75),
    ],
)
def test_a_step_is_that_of_the_network_as_torchvision_has_it_and_only_relus_write_into_their_input(make, forward, size):
    model = make()
    twin, image = copy.deepcopy(model), torch.randn(2, 3, size, size)
    value = image.clone()
    for layer in layers(copy.deepcopy(model)):
        version, output = value._version, layer(value)
        assert isinstance(layer, nn.ReLU) or value._version == version
        value = output.detach()
    chain, expected = step(model, nn.Module.__call__, image), step(twin, forward, image)
    assert chain.keys() == expected.keys()
    assert [key for key in chain if not torch.equal(chain[key], expected[key])] == []


def test_inception_transforms_its_input_as_torchvision_does():
    transform = models.inception_v3(transform_input=True, init_weights=False).transform
    image = torch.randn(2, 3, 4, 4)
    colours = zip(image.split(1, 1), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)
    expected = [each * (scale / 0.5) + (mean - 0.5) / 0.5 for each, mean, scale in colours]
    assert torch.equal(transform(image), torch.cat(expected, 1))


@pytest.mark.parametrize(("name", "size"), [("vgg16_bn", 224), ("densenet121", 224), ("inception_v3", 299)])
def test_images_of_the_papers_size_become_logits(name, size):
    assert network(name)(torch.empty(2, 3, size, size, device="meta")).shape == (2, 1000)
