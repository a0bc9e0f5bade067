"""The networks, built without memory for their weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from rotor_py import models


@pytest.fixture(scope="session")
def network() -> Callable[[str], nn.Sequential]:
    """A network by its name, on the meta device; tests share it and leave it as it is."""

    @cache
    def build(name: str) -> nn.Sequential:
        with torch.device("meta"):
            return getattr(models, name)()

    return build
