"""Networks on the meta device, and their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import nn

from rotor_py import models


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other make these small layers ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def network() -> Callable[[str], nn.Sequential]:
    """A network by its name, shared by tests."""

    @cache
    def build(name: str) -> nn.Sequential:
        with torch.device("meta"):
            return getattr(models, name)()

    return build


def layers(module: nn.Module) -> Iterator[nn.Module]:
    if type(module).forward is nn.Sequential.forward:
        for child in module.children():
            yield from layers(child)
    else:
        yield module
