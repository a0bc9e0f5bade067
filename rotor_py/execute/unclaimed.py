"""Gradients of parameters that a backward for inputs has computed on its way, until one for the parameters asks.

A zero-bubble pipeline splits each backward: first the gradients of a stage's input, which the previous rank waits for,
later those of its parameters. The engine is then asked for inputs alone, with the graph retained, and later handed the
same gradients again, node by node, for the parameters. A stage that has to be run again is run for the first pass, and
gives both at once; to run it twice more would take longer, and to keep its graph would take what was to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Gradients = Sequence[torch.Tensor | None]
_ADDED_UP = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether `torch.distributed.pipelining` begins the second pass of a node from one tensor of its own: the sum of the
gradients that arrived at all of its outputs, as the gradient of the first. Seen in torch 2.11, not in 2.13."""


@dataclass(frozen=True, slots=True)
class _Found:
    others: tuple[torch.Tensor | None, ...]
    """the gradients that came along with the one that this is kept for"""
    versions: tuple[int | None, ...]
    """of it and of the others"""
    parameters: Gradients


class Unclaimed:
    """Gradients of the parameters of one stage, by the gradients of its output that they were computed from.

    They are kept as long as somebody holds these, to start the second pass from: the same tensors, unchanged. After an
    ordinary pass nobody does, and they go at once.
    """

    def __init__(self) -> None:
        self._found: Any = None  # made when it is needed: almost no step needs it

    def keep(self, arrived: Gradients, parameters: Gradients) -> None:
        """Keep gradients of parameters, for the gradients that `arrived` at the output."""
        if self._found is None:
            self._found = WeakTensorKeyDictionary()
        first, others = _split(arrived)
        self._found[first] = _Found(others, _versions(first, others), parameters)

    def take(self, arrived: Gradients, *, leave: bool) -> Gradients | None:
        """The gradients of parameters for the gradients that `arrived`, if there are any; `leave` keeps them here."""
        if not self._found:
            return None
        first = self._kept_for(*_split(arrived))
        if first is None:
            return None
        found: _Found = self._found[first]
        if not leave:
            del self._found[first]
        return found.parameters

    def _kept_for(self, first: torch.Tensor, others: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
        """The tensor that gradients of parameters are kept for, if these arrived then, and are as they were."""
        found: _Found | None = self._found.get(first)
        if found is not None:
            same = all(a is b for a, b in zip(others, found.others, strict=True))
            return first if same and found.versions == _versions(first, others) else None
        if _ADDED_UP and all(other is None for other in others):
            return next((each for each, found in self._found.items() if _adds_up(each, found, first)), None)
        return None


def _split(arrived: Gradients) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The first gradient that exists, and all others in order."""
    at = next(i for i, gradient in enumerate(arrived) if gradient is not None)
    first = arrived[at]
    assert first is not None
    return first, (*arrived[:at], *arrived[at + 1 :])


def _versions(first: torch.Tensor, others: Gradients) -> tuple[int | None, ...]:
    return tuple(None if gradient is None else gradient._version for gradient in (first, *others))


def _adds_up(first: torch.Tensor, found: _Found, total: torch.Tensor) -> bool:
    """Whether `total` is the sum of the gradients that arrived, which are as they were."""
    if found.versions != _versions(first, found.others):
        return False
    terms = [first, *(gradient for gradient in found.others if gradient is not None)]
    return all(term.shape == total.shape for term in terms) and torch.equal(sum(terms[1:], terms[0]), total)
