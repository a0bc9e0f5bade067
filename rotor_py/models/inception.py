"""Inception v3 (Szegedy et al., "Rethinking the Inception architecture", arXiv 1512.00567) as a chain.

Images are 3 x 299 x 299; any size from 75 x 75 on works. The auxiliary classifier, which cannot be part of a chain, is
left out, and its weights are skipped when weights of torchvision's model are loaded. Use `transform_input=True` with
pretrained weights, as torchvision does.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotor_py.errors import InvalidValueError
from rotor_py.models.named_chain import NamedChain


def convolution(inplanes: int, outplanes: int, kernel_size: int | tuple[int, int], **options: Any) -> nn.Sequential:
    """A convolution, its normalisation and its ReLU."""
    conv = nn.Conv2d(inplanes, outplanes, kernel_size, bias=False, **options)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(outplanes, eps=0.001), relu=nn.ReLU(inplace=True)))


# The branches of a block run in torchvision's order: the backward adds their gradients of the block's input in reverse
# order, and another order would round differently.


class InceptionA(nn.Module):
    """Four branches: a 1 x 1 convolution, a 5 x 5 convolution, two 3 x 3 convolutions, and an average pooling."""

    def __init__(self, inplanes: int, pool_features: int) -> None:
        super().__init__()
        self.branch1x1 = convolution(inplanes, 64, 1)
        self.branch5x5_1 = convolution(inplanes, 48, 1)
        self.branch5x5_2 = convolution(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = convolution(inplanes, 64, 1)
        self.branch3x3dbl_2 = convolution(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = convolution(96, 96, 3, padding=1)
        self.branch_pool = convolution(inplanes, pool_features, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, single = self.branch1x1(x), self.branch5x5_2(self.branch5x5_1(x))
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([one, single, double, self.branch_pool(_average(x))], 1)


class InceptionB(nn.Module):
    """Halves height and width of the maps, by branches of 3 x 3 convolutions and a pooling."""

    def __init__(self, inplanes: int) -> None:
        super().__init__()
        self.branch3x3 = convolution(inplanes, 384, 3, stride=2)
        self.branch3x3dbl_1 = convolution(inplanes, 64, 1)
        self.branch3x3dbl_2 = convolution(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = convolution(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        single, double = self.branch3x3(x), self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([single, double, F.max_pool2d(x, 3, stride=2)], 1)


class InceptionC(nn.Module):
    """Four branches: a 1 x 1 convolution, one and two 7 x 7 convolutions as 1 x 7 and 7 x 1, and an average pooling."""

    def __init__(self, inplanes: int, width: int) -> None:
        super().__init__()
        row: dict[str, Any] = {"kernel_size": (1, 7), "padding": (0, 3)}
        column: dict[str, Any] = {"kernel_size": (7, 1), "padding": (3, 0)}
        self.branch1x1 = convolution(inplanes, 192, 1)
        self.branch7x7_1 = convolution(inplanes, width, 1)
        self.branch7x7_2 = convolution(width, width, **row)
        self.branch7x7_3 = convolution(width, 192, **column)
        self.branch7x7dbl_1 = convolution(inplanes, width, 1)
        self.branch7x7dbl_2 = convolution(width, width, **column)
        self.branch7x7dbl_3 = convolution(width, width, **row)
        self.branch7x7dbl_4 = convolution(width, width, **column)
        self.branch7x7dbl_5 = convolution(width, 192, **row)
        self.branch_pool = convolution(inplanes, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.branch1x1(x)
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([one, single, double, self.branch_pool(_average(x))], 1)


class InceptionD(nn.Module):
    """Halves height and width of the maps, by branches of 3 x 3 and 7 x 7 convolutions and a pooling."""

    def __init__(self, inplanes: int) -> None:
        super().__init__()
        self.branch3x3_1 = convolution(inplanes, 192, 1)
        self.branch3x3_2 = convolution(192, 320, 3, stride=2)
        self.branch7x7x3_1 = convolution(inplanes, 192, 1)
        self.branch7x7x3_2 = convolution(192, 192, (1, 7), padding=(0, 3))
        self.branch7x7x3_3 = convolution(192, 192, (7, 1), padding=(3, 0))
        self.branch7x7x3_4 = convolution(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        return torch.cat([three, self.branch7x7x3_4(seven), F.max_pool2d(x, 3, stride=2)], 1)


class InceptionE(nn.Module):
    """Four branches; the two with 3 x 3 convolutions end in a 1 x 3 and a 3 x 1 convolution side by side."""

    def __init__(self, inplanes: int) -> None:
        super().__init__()
        self.branch1x1 = convolution(inplanes, 320, 1)
        self.branch3x3_1 = convolution(inplanes, 384, 1)
        self.branch3x3_2a = convolution(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = convolution(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = convolution(inplanes, 448, 1)
        self.branch3x3dbl_2 = convolution(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = convolution(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = convolution(384, 384, (3, 1), padding=(1, 0))
        self.branch_pool = convolution(inplanes, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.branch1x1(x)
        single = self.branch3x3_1(x)
        singles = [self.branch3x3_2a(single), self.branch3x3_2b(single)]
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        doubles = [self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double)]
        return torch.cat([one, *singles, *doubles, self.branch_pool(_average(x))], 1)


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1)


class FromImageNet(nn.Module):
    """Converts images normalised for torchvision's other networks to the mean and deviation of Inception's, 0.5."""

    mean = (0.485, 0.456, 0.406)
    deviation = (0.229, 0.224, 0.225)

    def forward(self, x: Tensor) -> Tensor:
        colours = zip(x.unbind(1), self.mean, self.deviation, strict=True)
        return torch.stack([c * (deviation / 0.5) + (mean - 0.5) / 0.5 for c, mean, deviation in colours], 1)


class Inception3(NamedChain):
    """A stem, eleven blocks of branches, and a linear classifier after a dropout of rate `dropout`.

    `transform_input=True` converts images normalised for torchvision's other networks. `init_weights=False` keeps
    PyTorch's initial weights. Raises ValueError for `aux_logits=True`: a chain has no auxiliary classifier.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        aux_logits: bool = False,
        transform_input: bool = False,
        *,
        init_weights: bool = True,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if aux_logits:
            message = (
                "the auxiliary classifier reads an output in the middle of the network, so it cannot be a stage; use "
                "aux_logits=False, with which checkpoints that contain AuxLogits load as well"
            )
            raise InvalidValueError(message, kind="excluded", name="aux_logits")
        if transform_input:
            self.transform = FromImageNet()
        self.Conv2d_1a_3x3 = convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = convolution(32, 32, 3)
        self.Conv2d_2b_3x3 = convolution(32, 64, 3, padding=1)
        self.maxpool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = convolution(80, 192, 3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2)
        self.Mixed_5b = InceptionA(192, pool_features=32)
        self.Mixed_5c = InceptionA(256, pool_features=64)
        self.Mixed_5d = InceptionA(288, pool_features=64)
        self.Mixed_6a = InceptionB(288)
        self.Mixed_6b = InceptionC(768, width=128)
        self.Mixed_6c = InceptionC(768, width=160)
        self.Mixed_6d = InceptionC(768, width=160)
        self.Mixed_6e = InceptionC(768, width=192)
        self.Mixed_7a = InceptionD(768)
        self.Mixed_7b = InceptionE(1280)
        self.Mixed_7c = InceptionE(2048)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(dropout)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(2048, num_classes)
        if init_weights:
            for module in self.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.1)
        self.register_load_state_dict_pre_hook(_without_auxiliary_classifier)  # type: ignore[no-untyped-call] # torch's


def _without_auxiliary_classifier(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop the weights of the auxiliary classifier, which torchvision's files have."""
    for key in [key for key in state_dict if key.startswith(f"{prefix}AuxLogits.")]:
        del state_dict[key]


def inception_v3(**options: Any) -> Inception3:
    """Inception v3: 23,834,568 parameters. Takes the keywords of `Inception3`."""
    return Inception3(**options)
