"""Plain attributes of modules are found as they were, and put back, whatever a run does to them."""

from collections import deque
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import isolated
from rotor_profiling.attributes import Attributes, attributes_kept, kept_bytes
from tests.fields import raises
from tests.profiling.costs import CPU


class Refusing(dict[str, Any]):
    """A container that can be read, and not be filled, as the outputs of transformers."""

    def clear(self) -> None:
        raise TypeError("no")

    update = clear  # type: ignore[assignment]


class Everything(nn.Module):
    """A layer that changes all that an attribute can be."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.output = 0, Refusing()
        self.stats: dict[str, Any] = {"shapes": []}
        self.last, self.names = deque([0], maxlen=2), {"a"}
        self.total, self.state = torch.zeros(2), torch.zeros(2)
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.stats["shapes"].append(tuple(x.shape))
        self.stats["calls"] = self.calls
        self.last.append(self.calls)
        self.names.add(str(self.calls))
        self.total += x.detach().sum()
        self.state = self.state + 1
        self.output = Refusing(output=self.calls)
        self.made = self.calls
        if self.cache is None:
            self.cache = torch.ones(3)
        return x * self.calls


def present(layer: Everything) -> dict[str, Any]:
    names = ("calls", "stats", "last", "names", "total", "state", "output", "cache")
    return {name: str(getattr(layer, name)) for name in names} | {"made": getattr(layer, "made", None)}


def test_all_is_put_back_and_containers_and_tensors_are_the_same_objects() -> None:
    layer = Everything()

    def objects() -> list[Any]:
        return [layer.stats, layer.stats["shapes"], layer.total, layer.output]

    layer.stats["all"] = layer.stats  # a container in itself
    before, same = present(layer), objects()
    with attributes_kept(nn.Sequential(layer)):
        layer(torch.ones(2))
        layer(torch.ones(2))
    assert present(layer) == before
    assert all(a is b for a, b in zip(objects(), same, strict=True))


def test_kept_bytes_are_those_of_tensors_that_change() -> None:
    layer = Everything()
    with attributes_kept(layer):
        layer(torch.ones(2))
    assert kept_bytes(layer) == 2 * 8 + 8  # what is written into twice; what is replaced once


def test_a_recomputation_finds_everything_as_the_run_before_it_found_it() -> None:
    layer = Everything()
    layer(torch.ones(2))
    before, first, after = Attributes(layer), layer(torch.ones(2)), present(layer)
    changes = before.changes()
    for _ in range(2):  # as often as it is recomputed
        with attributes_kept(layer):
            for change in changes:
                change.restore_for_recompute()
            assert torch.equal(layer(torch.ones(2)), first)
            assert present(layer) == after
        assert present(layer) == after


@pytest.mark.parametrize("around", [False, True])
def test_measuring_restores_everything_except_a_cache(around: bool) -> None:
    layer = Everything()
    before = present(layer)
    with attributes_kept(layer, caches=False) if around else nullcontext():
        for _ in range(3):
            with isolated(layer, CPU):
                layer(torch.ones(2))
            if around:
                layer.made += 1  # the next run finds other than this one made
    assert layer.cache is not None
    layer.cache = None
    # A value made where none was stays while the layer is measured: only the next run shows whether it is a state.
    assert getattr(layer, "made", None) == (None if around else 1)
    assert {**present(layer), "made": None} == before


class Late(nn.Module):
    """Writes into a tensor from its second run on."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.calls = torch.zeros(1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            self.total.add_(1)
        return x


def test_a_tensor_that_is_written_to_for_the_first_time_is_refused_once() -> None:
    layer = Late()

    def run() -> Attributes:
        found, _ = Attributes(layer), layer(torch.ones(1))
        return found

    run().changes()
    with raises(RuntimeError, "attribute_changed", name="total"):
        run().changes()
    (change,) = [each for each in run().changes() if each.name == "total"]
    change.put_back()
    assert layer.total.item() == 1
