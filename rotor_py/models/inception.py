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


Kernel = tuple[int, int]
# A branch: for each of its steps, the number of channels and the kernel, or two kernels of convolutions side by side
Branch = list[tuple[int, Kernel] | tuple[int, Kernel, Kernel]]
_POINT, _THREE, _FIVE, _ROW, _COLUMN = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)


class Branches(nn.Module):
    """Concatenates what branches of convolutions make of one input, and a last branch, which is a pooling.

    If `pooled` is the number of channels of the pooling's branch, maps keep their size. If it is None, the last
    convolutions of all branches and the pooling halve height and width.
    """

    def __init__(self, inplanes: int, pooled: int | None, **branches: Branch) -> None:
        super().__init__()
        self.names: list[list[list[str]]] = []  # for each step of each branch, the names of its convolutions
        for branch, steps in branches.items():
            channels = inplanes
            self.names.append([])
            for number, (width, *kernels) in enumerate(steps, start=1):
                name = branch if len(steps) == 1 else f"{branch}_{number}"
                names = [name] if len(kernels) == 1 else [f"{name}a", f"{name}b"]
                halved = pooled is None and number == len(steps)
                for each, (rows, columns) in zip(names, kernels, strict=True):
                    options = {"stride": 2} if halved else {"padding": (rows // 2, columns // 2)}
                    self.add_module(each, convolution(channels, width, (rows, columns), **options))
                self.names[-1].append(names)
                channels = width
        self.branch_pool = None if pooled is None else convolution(inplanes, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        # In torchvision's order: the backward adds the branches' gradients of the input in reverse order, and another
        # order would round differently.
        made: list[Tensor] = []
        for steps in self.names:
            found = [x]
            for names in steps:
                found = [getattr(self, name)(found[0]) for name in names]
            made += found
        if self.branch_pool is None:
            return torch.cat([*made, F.max_pool2d(x, 3, stride=2)], 1)
        return torch.cat([*made, self.branch_pool(F.avg_pool2d(x, 3, stride=1, padding=1))], 1)


def inception_a(inplanes: int, pooled: int) -> Branches:
    five: Branch = [(48, _POINT), (64, _FIVE)]
    three: Branch = [(64, _POINT), (96, _THREE), (96, _THREE)]
    return Branches(inplanes, pooled, branch1x1=[(64, _POINT)], branch5x5=five, branch3x3dbl=three)


def inception_b(inplanes: int) -> Branches:
    return Branches(inplanes, None, branch3x3=[(384, _THREE)], branch3x3dbl=[(64, _POINT), (96, _THREE), (96, _THREE)])


def inception_c(inplanes: int, width: int) -> Branches:
    """A block with 7 x 7 convolutions as pairs of 1 x 7 and 7 x 1."""
    single: Branch = [(width, _POINT), (width, _ROW), (192, _COLUMN)]
    double: Branch = [(width, _POINT), (width, _COLUMN), (width, _ROW), (width, _COLUMN), (192, _ROW)]
    return Branches(inplanes, 192, branch1x1=[(192, _POINT)], branch7x7=single, branch7x7dbl=double)


def inception_d(inplanes: int) -> Branches:
    seven: Branch = [(192, _POINT), (192, _ROW), (192, _COLUMN), (192, _THREE)]
    return Branches(inplanes, None, branch3x3=[(192, _POINT), (320, _THREE)], branch7x7x3=seven)


def inception_e(inplanes: int) -> Branches:
    """A block in which 1 x 3 and 3 x 1 convolutions end two branches side by side."""
    single: Branch = [(384, _POINT), (384, (1, 3), (3, 1))]
    double: Branch = [(448, _POINT), (384, _THREE), (384, (1, 3), (3, 1))]
    return Branches(inplanes, 192, branch1x1=[(320, _POINT)], branch3x3=single, branch3x3dbl=double)


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
        self.Mixed_5b = inception_a(192, pooled=32)
        self.Mixed_5c = inception_a(256, pooled=64)
        self.Mixed_5d = inception_a(288, pooled=64)
        self.Mixed_6a = inception_b(288)
        self.Mixed_6b = inception_c(768, width=128)
        self.Mixed_6c = inception_c(768, width=160)
        self.Mixed_6d = inception_c(768, width=160)
        self.Mixed_6e = inception_c(768, width=192)
        self.Mixed_7a = inception_d(768)
        self.Mixed_7b = inception_e(1280)
        self.Mixed_7c = inception_e(2048)
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
