"""Networks on the meta device, and their layers."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from rotor_py import models


@cache
def network(name: str) -> nn.Sequential:
    with torch.device("meta"):
        return getattr(models, name)()


def layers(module: nn.Module) -> Iterator[nn.Module]:
    if type(module).forward is nn.Sequential.forward:
        for child in module.children():
            yield from layers(child)
    else:
        yield module
