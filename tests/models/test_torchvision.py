"""Side by side with torchvision, where it is installed."""

import copy
import inspect
from functools import partial

import pytest
import torch

from rotor_py import models

pytest.importorskip("torchvision")

from torchvision.models import densenet, inception, resnet, vgg

MODULES = {"r": resnet, "v": vgg, "d": densenet, "i": inception}


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "densenet121", "inception_v3", "vgg11_bn"])
def test_the_same_seed_gives_the_same_weights_and_the_same_step(name):
    options = {"aux_logits": False, "init_weights": True} if name == "inception_v3" else {}
    made, steps, image = [], [], torch.randn(2, 3, 75, 75)
    for make in (getattr(models, name), partial(getattr(MODULES[name[0]], name), **options)):
        torch.manual_seed(0)
        model = make()
        made.append(copy.deepcopy(model.state_dict()))
        torch.manual_seed(1)
        output = model(image)
        output.square().mean().backward()
        steps.append({"output": output, **{key: each.grad for key, each in model.named_parameters()}})
    for ours, theirs in (made, steps):
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("name", ["ResNet", "VGG", "DenseNet"])
def test_the_classes_take_the_same_arguments_in_the_same_order(name):
    ours, theirs = (inspect.signature(getattr(of, name)).parameters for of in (models, MODULES[name[0].lower()]))
    assert list(ours) == list(theirs)
