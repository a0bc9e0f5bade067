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


def number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", RECORDED)
def test_state_dict_is_torchvisions(network, name):
    state = network(name).state_dict()
    lines = "\n".join(f"{key} {tuple(value.shape)}" for key, value in state.items())
    assert len(state) == RECORDED[name]["entries"]
    assert hashlib.sha256(lines.encode()).hexdigest() == RECORDED[name]["sha256"]
    assert number_of_parameters(network(name)) == RECORDED[name]["parameters"]


@pytest.mark.parametrize("name", [name for name in models.__all__ if name.islower()])
def test_docstring_gives_the_number_of_parameters(network, name):
    assert f"{number_of_parameters(network(name)):,} parameters" in getattr(models, name).__doc__


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
