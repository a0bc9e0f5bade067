"""DenseNet (Huang et al., "Densely connected convolutional networks", arXiv 1608.06993) as a chain of dense layers.

Images are 3 x 224 x 224; any size from 29 x 29 on works. A dense layer reads all earlier feature maps of its block. In
this chain, it takes their concatenation, and returns that with its own maps appended, so every layer can be a stage.
Outputs and gradients equal torchvision's. Weights of torchvision's models of the same name load unchanged.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rotor_py.errors import InvalidValueError
from rotor_py.models.named_chain import NamedChain


class DenseLayer(nn.Module):
    """Returns `cat(x, new(x))`; `new` has two convolutions, of `bn_size * growth_rate` and `growth_rate` channels."""

    def __init__(self, num_input_features: int, growth_rate: int, bn_size: int, drop_rate: float) -> None:
        super().__init__()
        width = bn_size * growth_rate
        self.norm1 = nn.BatchNorm2d(num_input_features)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(num_input_features, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, growth_rate, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(self.relu1(self.norm1(x)))
        new = self.conv2(self.relu2(self.norm2(new)))
        return torch.cat([x, self.dropout(new)], 1)


class DenseNet(NamedChain):
    """A stem, blocks of `block_config[i]` dense layers with transitions between them, and a classifier.

    The stem makes `num_init_features` channels; each dense layer adds `growth_rate` channels, after a dropout of rate
    `drop_rate`. Raises ValueError for torchvision's `memory_efficient=True`: the plan decides what to recompute.
    """

    def __init__(
        self,
        growth_rate: int = 32,
        block_config: Sequence[int] = (6, 12, 24, 16),
        num_init_features: int = 64,
        bn_size: int = 4,
        drop_rate: float = 0.0,
        num_classes: int = 1000,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        if memory_efficient:
            message = (
                "memory_efficient=True would recompute in every dense layer whatever the limit is; leave it out and "
                "give Checkpointable a mem_limit, which recomputes only what does not fit"
            )
            raise InvalidValueError(message, kind="excluded", name="memory_efficient")
        channels = num_init_features
        stem = OrderedDict(
            conv0=nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            norm0=nn.BatchNorm2d(channels),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.features = nn.Sequential(stem)
        for number, count in enumerate(block_config, start=1):
            if number > 1:
                transition = OrderedDict(
                    norm=nn.BatchNorm2d(channels),
                    relu=nn.ReLU(inplace=True),
                    conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
                    pool=nn.AvgPool2d(2),
                )
                self.features.add_module(f"transition{number - 1}", nn.Sequential(transition))
                channels //= 2
            block = nn.Sequential()
            for position in range(1, count + 1):
                block.add_module(f"denselayer{position}", DenseLayer(channels, growth_rate, bn_size, drop_rate))
                channels += growth_rate
            self.features.add_module(f"denseblock{number}", block)
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)
        self.register_load_state_dict_pre_hook(_rename_old_keys)  # type: ignore[no-untyped-call] # torch's


def _rename_old_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename keys of torchvision's weight files, such as `denselayer1.norm.1.weight`, to those of its models."""
    for key in list(state_dict):
        renamed = re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", key)
        if renamed != key and key.startswith(prefix):
            state_dict[renamed] = state_dict.pop(key)


def densenet121(**options: Any) -> DenseNet:
    """DenseNet-121: 7,978,856 parameters. Takes the keywords of `DenseNet` from `bn_size` on."""
    return DenseNet(32, (6, 12, 24, 16), 64, **options)


def densenet161(**options: Any) -> DenseNet:
    """DenseNet-161: 28,681,000 parameters. Takes the keywords of `DenseNet` from `bn_size` on."""
    return DenseNet(48, (6, 12, 36, 24), 96, **options)


def densenet169(**options: Any) -> DenseNet:
    """DenseNet-169: 14,149,480 parameters. Takes the keywords of `DenseNet` from `bn_size` on."""
    return DenseNet(32, (6, 12, 32, 32), 64, **options)


def densenet201(**options: Any) -> DenseNet:
    """DenseNet-201: 20,013,928 parameters. Takes the keywords of `DenseNet` from `bn_size` on."""
    return DenseNet(32, (6, 12, 48, 32), 64, **options)
