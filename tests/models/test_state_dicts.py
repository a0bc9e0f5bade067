"""State dicts are torchvision's, key by key and shape by shape."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import models

RECORDED = json.loads((Path(__file__).parent / "data" / "torchvision.json").read_text())

PUBLISHED_PARAMETERS = {
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception_v3": 23_834_568,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg11_bn": 132_868_840,
    "vgg13_bn": 133_053_736,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19_bn": 143_678_248,
}

WELL_KNOWN_ENTRIES = [
    ("resnet18", "conv1.weight", (64, 3, 7, 7)),
    ("resnet18", "layer2.0.downsample.0.weight", (128, 64, 1, 1)),
    ("resnet50", "layer1.0.downsample.1.running_mean", (256,)),
    ("resnet50", "layer4.2.bn3.num_batches_tracked", ()),
    ("resnet50", "fc.weight", (1000, 2048)),
    ("vgg16", "features.28.weight", (512, 512, 3, 3)),
    ("vgg16_bn", "features.41.running_var", (512,)),
    ("vgg16_bn", "classifier.0.weight", (4096, 25088)),
    ("densenet121", "features.conv0.weight", (64, 3, 7, 7)),
    ("densenet121", "features.denseblock1.denselayer2.norm1.weight", (96,)),
    ("densenet121", "features.transition3.conv.weight", (512, 1024, 1, 1)),
    ("densenet121", "features.norm5.bias", (1024,)),
    ("densenet121", "classifier.weight", (1000, 1024)),
    ("inception_v3", "Conv2d_1a_3x3.conv.weight", (32, 3, 3, 3)),
    ("inception_v3", "Mixed_6c.branch7x7dbl_2.conv.weight", (160, 160, 7, 1)),
    ("inception_v3", "Mixed_7c.branch3x3dbl_3b.bn.weight", (384,)),
    ("inception_v3", "fc.bias", (1000,)),
]


def number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", RECORDED)
def test_state_dict_is_torchvisions(network, name):
    state = network(name).state_dict()
    lines = "\n".join(f"{key} {tuple(value.shape)}" for key, value in state.items())
    assert len(state) == RECORDED[name]["entries"]
    assert hashlib.sha256(lines.encode()).hexdigest() == RECORDED[name]["sha256"]


@pytest.mark.parametrize(("name", "count"), PUBLISHED_PARAMETERS.items())
def test_number_of_parameters_is_the_published_one(network, name, count):
    assert number_of_parameters(network(name)) == count == RECORDED[name]["parameters"]


@pytest.mark.parametrize("name", [name for name in models.__all__ if name.islower()])
def test_docstring_gives_the_number_of_parameters(network, name):
    assert f"{number_of_parameters(network(name)):,} parameters" in getattr(models, name).__doc__


@pytest.mark.parametrize(("name", "key", "shape"), WELL_KNOWN_ENTRIES)
def test_well_known_entry(network, name, key, shape):
    assert network(name).state_dict()[key].shape == shape


def test_resnet1001_has_as_many_layers_as_its_name_says(network):
    model = network("resnet1001")
    weighted = [path for path, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len([path for path in weighted if "shortcut" not in path]) == 1001
    assert len([path for path in weighted if "shortcut" in path]) == 3


def small_densenet() -> models.DenseNet:
    return models.DenseNet(4, (2, 1), 8, bn_size=2, num_classes=3)


def with_old_keys(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The keys of torchvision's files: `denselayer1.norm.1.weight`, not `denselayer1.norm1.weight`."""
    old = {}
    for key, value in state.items():
        for layer in ("norm", "conv"):
            for number in "12":
                key = key.replace(f".{layer}{number}.", f".{layer}.{number}.") if "denselayer" in key else key
        old[key] = value
    return old


@pytest.mark.parametrize("prefix", ["", "backbone.inner."])
def test_densenet_loads_files_with_the_old_keys(prefix):
    source, target = small_densenet(), small_densenet()
    state = with_old_keys(source.state_dict())
    assert "features.denseblock1.denselayer2.conv.1.weight" in state
    file = {prefix + key: value for key, value in state.items()}
    keys = list(file)
    holder = nn.ModuleDict({"backbone": nn.ModuleDict({"inner": target})}) if prefix else target
    holder.load_state_dict(file, strict=True)
    assert list(file) == keys
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in target.state_dict().items())


def inception_checkpoint(network) -> dict[str, torch.Tensor]:
    state = network("inception_v3").state_dict()
    head = {"conv0.conv.weight": (128, 768, 1, 1), "conv0.bn.weight": (128,), "fc.weight": (1000, 768)}
    return state | {f"AuxLogits.{key}": torch.empty(shape, device="meta") for key, shape in head.items()}


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_inception_passes_over_the_auxiliary_classifier_in_a_checkpoint(network, prefix):
    with torch.device("meta"):
        model = models.inception_v3()
    file = {prefix + key: value for key, value in inception_checkpoint(network).items()}
    holder = nn.ModuleDict({"backbone": model}) if prefix else model
    holder.load_state_dict(file, strict=True, assign=True)
    assert f"{prefix}AuxLogits.fc.weight" in file
    assert not any("AuxLogits" in key for key in model.state_dict())


def test_other_unknown_keys_are_still_errors(network):
    with torch.device("meta"):
        model = models.inception_v3()
    file = inception_checkpoint(network) | {"Mixed_9z.weight": torch.empty(1, device="meta")}
    with pytest.raises(RuntimeError, match="Mixed_9z"):
        model.load_state_dict(file, strict=True, assign=True)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_load_checkpoints_as_well(duplicate):
    source = small_densenet()
    twin = duplicate(source)
    with torch.no_grad():
        source.classifier.bias.fill_(5)
    twin.load_state_dict(with_old_keys(source.state_dict()), strict=True)
    assert torch.equal(twin.classifier.bias, source.classifier.bias)
