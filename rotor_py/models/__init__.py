"""Image networks as chains: each is an `nn.Sequential`, whose layers a plan stores or recomputes one by one.

Constructors, layer names and state dicts are torchvision's, so torchvision's weight files load unchanged:

    model = Checkpointable(resnet50(num_classes=10), mem_limit="4GB")

`resnet200` and `resnet1001`, which torchvision lacks, follow He et al., "Identity mappings in deep residual networks".
"""

from rotor_py.models.densenet import DenseNet, densenet121, densenet161, densenet169, densenet201
from rotor_py.models.inception import Inception3, inception_v3
from rotor_py.models.resnet import (
    PreActResNet,
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnet200,
    resnet1001,
)
from rotor_py.models.vgg import VGG, vgg11, vgg11_bn, vgg13, vgg13_bn, vgg16, vgg16_bn, vgg19, vgg19_bn

__all__ = [
    "VGG",
    "DenseNet",
    "Inception3",
    "PreActResNet",
    "ResNet",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "inception_v3",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "resnet1001",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
]
