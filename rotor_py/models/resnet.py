"""ResNet (He et al., "Deep residual learning for image recognition", arXiv 1512.03385) as a chain of blocks.

Images are 3 x 224 x 224; other sizes work too. A bottleneck has its stride in the 3 x 3 convolution, as in torchvision
("ResNet v1.5"). Weights of torchvision's models of the same name load unchanged.

`PreActResNet` is the pre-activation network of He et al., "Identity mappings in deep residual networks", arXiv
1603.05027, of depth 9n + 2 for images of 3 x 32 x 32. Normalisation and ReLU come before each convolution, so blocks
end with the addition. As in the authors' program, a block that changes the shape has its stride in its first
convolution, and its shortcut is a convolution of the activated input. The final average covers the whole image, so
larger images work too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from rotor_py.errors import InvalidValueError
from rotor_py.models.named_chain import NamedChain, check_length

Norm = Callable[[int], nn.Module]


class ResidualBlock(nn.Module):
    """`relu(branch(x) + shortcut(x))`, where the shortcut is the identity or `downsample`.

    The branch is `convolutions`, each with a normalisation, and a ReLU between two.
    """

    convolutions: Callable[..., list[nn.Conv2d]]

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        groups: int = 1,
        base_width: int = 64,
        dilation: int = 1,
        norm_layer: Norm | None = None,
    ) -> None:
        super().__init__()
        self.count = 0
        for conv in self.convolutions(inplanes, planes, stride, groups, base_width, dilation):
            self.count += 1
            self.add_module(f"conv{self.count}", conv)
            self.add_module(f"bn{self.count}", (norm_layer or nn.BatchNorm2d)(conv.out_channels))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for number in range(1, self.count + 1):
            conv, norm = getattr(self, f"conv{number}"), getattr(self, f"bn{number}")
            out = norm(conv(out if number == 1 else self.relu(out)))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]  # calling a module returns Any


class BasicBlock(ResidualBlock):
    """A block of two 3 x 3 convolutions. Raises ValueError for groups, width or dilation, as torchvision does."""

    expansion = 1

    def convolutions(
        self, inplanes: int, planes: int, stride: int, groups: int, base_width: int, dilation: int
    ) -> list[nn.Conv2d]:
        if (groups, base_width, dilation) != (1, 64, 1):
            message = (
                f"a basic block has groups=1, width_per_group=64 and no dilation, but got groups={groups}, "
                f"width_per_group={base_width} and dilation={dilation}; use a network of bottlenecks, such as resnet50"
            )
            raise InvalidValueError(message, kind="not_a_basic_block")
        first = nn.Conv2d(inplanes, planes, 3, stride=stride, padding=1, bias=False)
        return [first, nn.Conv2d(planes, planes, 3, padding=1, bias=False)]


class Bottleneck(ResidualBlock):
    """A block of three convolutions: 1 x 1 to fewer channels, 3 x 3, and 1 x 1 to more channels."""

    expansion = 4

    def convolutions(
        self, inplanes: int, planes: int, stride: int, groups: int, base_width: int, dilation: int
    ) -> list[nn.Conv2d]:
        width = planes * base_width // 64 * groups
        how: dict[str, Any] = {"stride": stride, "padding": dilation, "dilation": dilation, "groups": groups}
        return [
            nn.Conv2d(inplanes, width, 1, bias=False),
            nn.Conv2d(width, width, 3, bias=False, **how),
            nn.Conv2d(width, planes * self.expansion, 1, bias=False),
        ]


class ResNet(NamedChain):
    """A stem, four groups of `layers[0] … layers[3]` blocks, and a linear classifier.

    `groups` and `width_per_group` are for ResNeXt and wide networks of bottlenecks. `replace_stride_with_dilation` says
    for each of the last three groups whether it dilates its convolutions instead of halving its input. `norm_layer` is
    called with a number of channels and returns their normalisation. With `zero_init_residual`, the branch of every
    block is zero at first, so that the block returns its shortcut.

    Raises ValueError unless `layers` has four elements and `replace_stride_with_dilation` three, and if basic blocks
    get groups, another width or a dilation.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: Sequence[int],
        num_classes: int = 1000,
        zero_init_residual: bool = False,
        groups: int = 1,
        width_per_group: int = 64,
        replace_stride_with_dilation: Sequence[bool] | None = None,
        norm_layer: Norm | None = None,
    ) -> None:
        super().__init__()
        dilate = (False, False, False) if replace_stride_with_dilation is None else replace_stride_with_dilation
        check_length("replace_stride_with_dilation", dilate, 3, "one for each group after the first")
        check_length("layers", layers, 4, "the numbers of blocks in the four groups")
        norm = norm_layer or nn.BatchNorm2d
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

        channels, dilation = 64, 1
        for group, (count, dilated) in enumerate(zip(layers, (False, *dilate), strict=True)):
            planes = 64 * 2**group
            width = planes * block.expansion
            stride = 1 if group == 0 or dilated else 2
            downsample = None
            if stride != 1 or channels != width:
                downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride=stride, bias=False), norm(width))
            blocks = [block(channels, planes, stride, downsample, groups, width_per_group, dilation, norm)]
            dilation *= 2 if dilated else 1
            blocks += [block(width, planes, 1, None, groups, width_per_group, dilation, norm) for _ in range(1, count)]
            self.add_module(f"layer{group + 1}", nn.Sequential(*blocks))
            channels = width

        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)
        self.initialise_convolutions()
        for module in self.modules() if zero_init_residual else ():
            if isinstance(module, ResidualBlock):
                scale = getattr(module, f"bn{module.count}").weight
                if isinstance(scale, nn.Parameter):
                    nn.init.zeros_(scale)


def resnet18(**options: Any) -> ResNet:
    """ResNet-18: 11,689,512 parameters. Takes the keywords of `ResNet` from `num_classes` on."""
    return ResNet(BasicBlock, (2, 2, 2, 2), **options)


def resnet34(**options: Any) -> ResNet:
    """ResNet-34: 21,797,672 parameters. Takes the keywords of `ResNet` from `num_classes` on."""
    return ResNet(BasicBlock, (3, 4, 6, 3), **options)


def resnet50(**options: Any) -> ResNet:
    """ResNet-50: 25,557,032 parameters. Takes the keywords of `ResNet` from `num_classes` on."""
    return ResNet(Bottleneck, (3, 4, 6, 3), **options)


def resnet101(**options: Any) -> ResNet:
    """ResNet-101: 44,549,160 parameters. Takes the keywords of `ResNet` from `num_classes` on."""
    return ResNet(Bottleneck, (3, 4, 23, 3), **options)


def resnet152(**options: Any) -> ResNet:
    """ResNet-152: 60,192,808 parameters. Takes the keywords of `ResNet` from `num_classes` on."""
    return ResNet(Bottleneck, (3, 8, 36, 3), **options)


def resnet200(**options: Any) -> ResNet:
    """ResNet-200: 64,673,832 parameters. Takes the keywords of `ResNet` from `num_classes` on.

    The numbers of blocks are from He et al., "Identity mappings in deep residual networks"; the blocks are those of
    ResNet-50. torchvision has no such network.
    """
    return ResNet(Bottleneck, (3, 24, 36, 3), **options)


class PreActBottleneck(nn.Module):
    """`branch(x) + shortcut(x)`; the branch is three convolutions, each after a normalisation and a ReLU."""

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


class PreActResNet(NamedChain):
    """A 3 x 3 convolution, three groups of `layers[0] … layers[2]` bottlenecks, and a linear classifier.

    Raises ValueError unless `layers` has three elements.
    """

    def __init__(self, layers: Sequence[int], num_classes: int = 10) -> None:
        super().__init__()
        check_length("layers", layers, 3, "the numbers of blocks in the three groups")
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
        self.initialise_convolutions()
        nn.init.zeros_(self.fc.bias)


def resnet1001(*, num_classes: int = 10) -> PreActResNet:
    """ResNet-1001, of depth 9n + 2 with n = 111: 10,327,706 parameters with the ten classes of CIFAR-10."""
    return PreActResNet((111, 111, 111), num_classes)
