"""State dicts are torchvision's, key by key and shape by shape."""

import copy
import hashlib
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import models
from tests.models.conftest import layers, network

RECORDED = json.loads((Path(__file__).parent / "data" / "torchvision.json").read_text())
NUMBER_OF_LAYERS = {
    "densenet121": 79, "densenet161": 99, "densenet169": 103, "densenet201": 119, "inception_v3": 32,
    "resnet18": 15, "resnet34": 23, "resnet50": 23, "resnet101": 40, "resnet152": 57,
    "resnet200": 73, "resnet1001": 339, "vgg11": 30, "vgg11_bn": 38, "vgg13": 34,
    "vgg13_bn": 44, "vgg16": 40, "vgg16_bn": 53, "vgg19": 46, "vgg19_bn": 62,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in models.__all__ if name.islower()])
def test_a_network_is_a_plain_sequential_with_the_keys_of_torchvision_and_as_many_parameters_as_it_says(name):
    model = network(name)
    assert isinstance(model, nn.Sequential)
    assert type(model).forward is nn.Sequential.forward
    assert len(list(layers(model))) == NUMBER_OF_LAYERS[name]
    parameters, state = sum(each.numel() for each in model.parameters()), model.state_dict()
    if name == "resnet1001":  # as many layers as its name says
        weighted = [path for path, each in model.named_modules() if isinstance(each, nn.Conv2d | nn.Linear)]
        assert len([path for path in weighted if "shortcut" not in path]) == 1001
        assert len([path for path in weighted if "shortcut" in path]) == 3
    assert f"{parameters:,} parameters" in getattr(models, name).__doc__
    if name in RECORDED:
        lines = "\n".join(f"{key} {tuple(value.shape)}" for key, value in state.items())
        found = {"entries": len(state), "sha256": hashlib.sha256(lines.encode()).hexdigest(), "parameters": parameters}
        assert found == RECORDED[name]
    with pytest.raises(TypeError, match="nonsense"):
        getattr(models, name)(nonsense=1)


def with_old_keys(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The keys of torchvision's files: `denselayer1.norm.1.weight`, not `denselayer1.norm1.weight`."""
    return {re.sub(r"(denselayer\d+\.)(norm|conv)([12])\.", r"\1\2.\3.", key): value for key, value in state.items()}


@pytest.mark.parametrize("prefix", ["", "backbone.inner."])
def test_densenet_and_its_copies_load_files_with_the_old_keys(prefix):
    source, target = (models.DenseNet(4, (2, 1), 8, bn_size=2, num_classes=3) for _ in range(2))
    state = with_old_keys(source.state_dict())
    assert "features.denseblock1.denselayer2.conv.1.weight" in state
    file = {prefix + key: value for key, value in state.items()}
    keys = list(file)
    for twin in (target, copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        holder = nn.ModuleDict({"backbone": nn.ModuleDict({"inner": twin})}) if prefix else twin
        holder.load_state_dict(file, strict=True)
        assert list(file) == keys
        assert all(torch.equal(value, source.state_dict()[key]) for key, value in twin.state_dict().items())


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_inception_passes_over_the_auxiliary_classifier_in_a_checkpoint_and_refuses_other_keys(prefix):
    with torch.device("meta"):
        model = models.inception_v3()
        head = {"AuxLogits.conv0.bn.weight": torch.empty(128), "AuxLogits.fc.weight": torch.empty(1000, 768)}
        unknown = {"Mixed_9z.weight": torch.empty(1)}
    file = {prefix + key: value for key, value in {**network("inception_v3").state_dict(), **head}.items()}
    holder = nn.ModuleDict({"backbone": model}) if prefix else model
    holder.load_state_dict(file, strict=True, assign=True)
    assert f"{prefix}AuxLogits.fc.weight" in file
    assert not any("AuxLogits" in key for key in model.state_dict())
    with pytest.raises(RuntimeError, match="Mixed_9z"):
        holder.load_state_dict(file | unknown, strict=True, assign=True)
