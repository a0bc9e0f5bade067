"""What constructors accept and refuse, initial weights, and chains that can be sliced and changed."""

import copy
import hashlib
import json
import math
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import models
from rotor_py.models.resnet import BasicBlock, Bottleneck
from tests.fields import raises
from tests.models.conftest import network


def test_options_set_the_last_layer_and_of_resnet_replace_norms_make_groups_and_dilate():
    with torch.device("meta"):
        for name in ("resnet18", "vgg11", "densenet121", "inception_v3"):
            *_, last = getattr(models, name)(num_classes=7).modules()
            assert last.out_features == 7
        normed = models.resnet50(norm_layer=lambda channels: nn.GroupNorm(32, channels))
        grouped = models.resnet50(groups=32, width_per_group=4)
        dilated = models.resnet50(replace_stride_with_dilation=[False, True, True])
        assert dilated[:-3](torch.empty(1, 3, 64, 64)).shape == (1, 2048, 8, 8)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in normed.modules())
    assert sum(each.numel() for each in grouped.parameters()) == 25_028_904  # published for ResNeXt-50 32x4d


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_zero_init_residual_starts_blocks_as_the_identity(block):
    model = models.ResNet(block, (2, 1, 1, 1), zero_init_residual=True).eval()
    x = torch.rand(1, 64 * block.expansion, 4, 4)
    assert torch.equal(model.layer1[1](x), x)
    norm = partial(nn.BatchNorm2d, affine=False)  # has no weights to be zero
    models.ResNet(block, (1, 1, 1, 1), zero_init_residual=True, norm_layer=norm)


def test_weights_start_with_the_variance_of_kaiming_or_truncated_normals_or_as_torch_has_them_if_told_so():
    weight = models.ResNet(BasicBlock, (1, 1, 1, 1)).layer4[0].conv2.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    assert models.inception_v3().Mixed_7c.branch1x1.conv.weight.std().item() == pytest.approx(0.1, rel=0.01)
    plain = models.inception_v3(init_weights=False).Mixed_7c.branch1x1.conv.weight
    assert plain.abs().max().item() <= 1 / math.sqrt(2048)
    features = nn.Sequential(nn.Conv2d(3, 4, 3))
    with torch.device("meta"):
        thin = models.VGG(features, init_weights=False, dropout=0.25)
        assert features[0].bias.abs().sum() > 0
        assert thin.classifier[2].p == 0.25
        assert models.VGG(features).classifier[2].p == 0.5
    assert features[0].bias.abs().sum() == 0


@pytest.mark.parametrize(
    ("build", "kind", "name"),
    [
        (lambda: models.resnet18(groups=2), "not_a_basic_block", None),
        (lambda: models.resnet34(width_per_group=128), "not_a_basic_block", None),
        (lambda: models.resnet18(replace_stride_with_dilation=(False, False, True)), "not_a_basic_block", None),
        (lambda: models.resnet50(replace_stride_with_dilation=(True,)), "wrong_length", "replace_stride_with_dilation"),
        (lambda: models.ResNet(BasicBlock, (1, 1)), "wrong_length", "layers"),
        (lambda: models.PreActResNet((1, 1, 1, 1)), "wrong_length", "layers"),
        (lambda: models.densenet121(memory_efficient=True), "excluded", "memory_efficient"),
        (lambda: models.inception_v3(aux_logits=True), "excluded", "aux_logits"),
    ],
)
def test_bad_arguments_are_refused(build, kind, name):
    with torch.device("meta"), raises(ValueError, kind, name=name):
        build()


def test_slices_are_plain_sequentials_that_share_the_layers_and_the_classifier_can_be_assigned():
    model = models.PreActResNet((1, 1, 1))
    body = model[:-3]
    assert type(body) is nn.Sequential
    assert list(dict(body.named_children())) == ["conv1", "layer1", "layer2", "layer3", "bn", "relu"]
    assert body[0] is model.conv1
    assert model[-1] is model.fc
    model.eval().fc = nn.Linear(256, 3)
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 3)


RECORDED = json.loads((Path(__file__).parent / "data" / "torchvision.json").read_text())
DEEP = ["densenet161", "densenet169", "densenet201", "resnet101", "resnet152", "resnet200", "resnet1001"]
NAMES = [name for name in models.__all__ if name.islower()]


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in DEEP)) for each in NAMES])
def test_a_network_is_a_plain_sequential_with_the_keys_of_torchvision_and_as_many_parameters_as_it_says(name):
    model = network(name)
    assert isinstance(model, nn.Sequential)
    assert type(model).forward is nn.Sequential.forward
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


@pytest.mark.parametrize("prefix", ["", "backbone.inner."])
def test_densenet_and_its_copies_load_files_with_the_old_keys(prefix):
    source, target = (models.DenseNet(4, (2, 1), 8, bn_size=2, num_classes=3) for _ in range(2))
    pattern = r"(denselayer\d+\.)(norm|conv)([12])\."  # in torchvision's files `norm.1`, not `norm1`
    state = {re.sub(pattern, r"\1\2.\3.", key): value for key, value in source.state_dict().items()}
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
