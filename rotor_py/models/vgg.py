"""VGG (Simonyan and Zisserman, "Very deep convolutional networks", arXiv 1409.1556), with and without batch norm.

Images are 3 x 224 x 224; any size from 32 x 32 on works. Weights of torchvision's models of the same name load
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rotor_py.models.named_chain import NamedChain


class VGG(NamedChain):
    """The layers of `features`, whose output has 512 channels, and a classifier of three linear layers.

    `init_weights=False` keeps PyTorch's initial weights. `dropout` is the rate of the classifier's dropout layers.
    """

    def __init__(
        self, features: nn.Sequential, num_classes: int = 1000, init_weights: bool = True, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        if init_weights:
            self.initialise_convolutions()
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.01)
                if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)


def _vgg(counts: Sequence[int], options: dict[str, Any], *, batch_norm: bool = False) -> VGG:
    """Return a VGG of five groups: group i has `counts[i]` 3 x 3 convolutions, and a pooling by two at its end."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in zip((64, 128, 256, 512, 512), counts, strict=True):
        for _ in range(count):
            norm = [nn.BatchNorm2d(width)] if batch_norm else []
            layers += [nn.Conv2d(channels, width, 3, padding=1), *norm, nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return VGG(nn.Sequential(*layers), **options)


def vgg11(**options: Any) -> VGG:
    """VGG-11: 132,863,336 parameters. Takes the keywords of `VGG` from `num_classes` on."""
    return _vgg((1, 1, 2, 2, 2), options)


def vgg11_bn(**options: Any) -> VGG:
    """VGG-11 with batch norm: 132,868,840 parameters. Takes the keywords of `VGG` from `num_classes` on."""
    return _vgg((1, 1, 2, 2, 2), options, batch_norm=True)


def vgg13(**options: Any) -> VGG:
    """VGG-13: 133,047,848 parameters. Takes the keywords of `VGG` from `num_classes` on."""
    return _vgg((2, 2, 2, 2, 2), options)


def vgg13_bn(**options: Any) -> VGG:
    """VGG-13 with batch norm: 133,053,736 parameters. Takes the keywords of `VGG` from `num_classes` on."""
    return _vgg((2, 2, 2, 2, 2), options, batch_norm=True)


def vgg16(**options: Any) -> VGG:
    """VGG-16: 138,357,544 parameters. Takes the keywords of `VGG` from `num_classes` on."""
    return _vgg((2, 2, 3, 3, 3), options)


def vgg16_bn(**options: Any) -> VGG:
    """VGG-16 with batch norm: 138,365,992 parameters. Takes the keywords of `VGG` from `num_classes` on."""
    return _vgg((2, 2, 3, 3, 3), options, batch_norm=True)


def vgg19(**options: Any) -> VGG:
    """VGG-19: 143,667,240 parameters. Takes the keywords of `VGG` from `num_classes` on."""
    return _vgg((2, 2, 4, 4, 4), options)


def vgg19_bn(**options: Any) -> VGG:
    """VGG-19 with batch norm: 143,678,248 parameters. Takes the keywords of `VGG` from `num_classes` on."""
    return _vgg((2, 2, 4, 4, 4), options, batch_norm=True)
