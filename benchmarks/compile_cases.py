"""The models of `compile.py`, and what a block of each is: the modules that people checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ecosystem import CLASSES, Case, convnext, gpt2, images, its_own, llama, unet, vit
from torch import nn
from torch.utils.checkpoint import checkpoint


def resnet50() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=10, problem_type=CLASSES)  # the defaults are those of a ResNet-50
    return ResNetForImageClassification(config), images(8, 64), its_own


CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "Llama": (partial(llama, layers=4, batch=16), "LlamaDecoderLayer"),
    "GPT-2": (partial(gpt2, batch=16), "GPT2Block"),
    "ViT": (partial(vit, batch=32), "ViTLayer"),
    "ResNet-50": (resnet50, "ResNetBottleNeckLayer"),
    "ConvNeXt": (partial(convnext, batch=64), "ConvNextLayer"),
    "U-Net": (partial(unet, batch=16), "DoubleConvolution"),
}
"""How to make a model, and the class of its blocks, for models that do not checkpoint them by themselves.

A step takes a tenth of a second or more. What a planned step takes in Python, a millisecond, is measured by
`compile_python.py`, and would be most of the differences here if steps were as short as the tests'.
"""


class Checkpointed(nn.Module):
    """A block that is run again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def checkpointed(model: Any, kind: str) -> nn.Module:
    """The model with every block of this class checkpointed. ValueError if it has none."""
    if getattr(model, "supports_gradient_checkpointing", False):
        # Its own way: a block of transformers fills a cache in its first run, which a second run must not fill again.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model  # type: ignore[no-any-return] # a module
    found = [
        (parent, name)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child).__name__ == kind
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no {kind}")
    for parent, name in found:
        parent._modules[name] = Checkpointed(getattr(parent, name))
    return model
