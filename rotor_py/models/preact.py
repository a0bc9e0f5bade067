"""Pre-activation ResNet (He et al., "Identity mappings in deep residual networks", arXiv 1603.05027).

A network of depth 9n + 2 for images of 3 x 32 x 32: a 3 x 3 convolution, three groups of n bottlenecks with 64, 128 and
256 channels, and a linear classifier. Normalisation and ReLU come before each convolution, so nothing stands between
the blocks but additions. As in the authors' program, a block that changes the shape has its stride in its first
convolution, and its shortcut is a convolution of the activated input; the other shortcuts are the identity. The average
at the end is over the whole image, so that larger images work too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rotor_py.models.network import Network

__all__ = ["PreActBottleneck", "PreActResNet", "resnet1001"]


class PreActBottleneck(nn.Module):
    """`branch(x) + shortcut(x)`: three convolutions, each after a normalisation and a ReLU."""

    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        outplanes = planes * self.expansion
        self.bn1 = nn.BatchNorm2d(inplanes)
        self.conv1 = nn.Conv2d(inplanes, planes, 1, stride=stride, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, outplanes, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or inplanes != outplanes:
            self.shortcut = nn.Conv2d(inplanes, outplanes, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.relu(self.bn1(x))
        out = self.conv1(activated)
        out = self.conv2(self.relu(self.bn2(out)))
        out = self.conv3(self.relu(self.bn3(out)))
        out += x if self.shortcut is None else self.shortcut(activated)
        return out  # type: ignore[no-any-return]  # calling a module returns Any


class PreActResNet(Network):
    """A 3 x 3 convolution, three groups of `layers[0] … layers[2]` bottlenecks, and a linear classifier.

    Raises ValueError if `layers` has not three elements.
    """

    def __init__(self, layers: Sequence[int], num_classes: int = 10) -> None:
        super().__init__()
        if len(layers) != 3:
            raise ValueError(f"layers has {len(layers)} elements; give 3, the numbers of blocks in the three groups")
        channels = 16
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        for group, count in enumerate(layers):
            blocks = []
            for position in range(count):
                planes = 16 * 2**group
                blocks.append(PreActBottleneck(channels, planes, stride=2 if group > 0 and position == 0 else 1))
                channels = planes * PreActBottleneck.expansion
            self.add_module(f"layer{group + 1}", nn.Sequential(*blocks))
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)


def resnet1001(*, num_classes: int = 10) -> PreActResNet:
    """ResNet-1001, n = 111: 10,327,706 parameters with the ten classes of CIFAR-10."""
    return PreActResNet((111, 111, 111), num_classes)
