"""Optional offers of a stage: other ways to run it, and facts for running it alone.

A user's layer offers nothing. A stage generated from a captured graph derives from `StageOffers`. Every use goes
through `offers_of`, so this file lists all offers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

from torch import nn

from rotor_py.errors import InvalidValueError

Run = Callable[[Any], Any]
"""Runs a stage: maps its input to its output."""

RunThrough = Callable[[list[Any], Callable[[int], str]], tuple[Any, ...]]
"""Runs several stages as one, in the surrounding graph.

Called with the input of the first in a list, which it empties, and a function that names a stage by its index, for
errors. Returns the output of the last, without the values that the stages share.
"""

Wrap = Callable[[nn.Module], nn.Module]
"""Replaces a piece of a stage."""


class StageOffers:
    """Offers of a stage. Every default offers nothing, so a stage overrides only what it has."""

    carried: Mapping[str, int] = MappingProxyType({})
    """Output tensors handed on outside the chain: name, and index among the output tensors."""

    handed_on: Mapping[int, int] = MappingProxyType({})
    """Output tensors that are input tensors not otherwise used: index in the output, to index in the input. Their
    gradients pass the stage's backward unchanged."""

    wiring: Hashable = None
    """Positions of the input values that the stage reads and hands on. Stages with one signature (`stage_signature`)
    cost the same whichever values they read, but compiled code reads fixed ones."""

    needs_gradient: Sequence[bool] | None = None
    """For every input tensor, whether it needs a gradient in training; None if only a run shows it."""

    saves_through_hooks = True
    """Whether saved-tensor hooks active during a run see the tensors that autograd saves."""

    shared: int = 0
    """Number of values at the end of its input that all stages of the chain share."""

    last: bool = True
    """Whether its output is that of the chain, without the shared values."""

    @property
    def parts(self) -> Sequence[StageOffers]:
        """The stages joined in this one, in order."""
        return (self,)

    def run_through(self, following: Sequence[StageOffers]) -> RunThrough | None:
        """Return how to run this stage and `following` as one; None if they must run one by one."""
        return None

    def gather_begun(self) -> None:
        """Gather the sharded parameters of modules that began before this stage. It gathers the others itself."""

    def in_pieces(self, wrap: Wrap) -> Run | None:
        """Return how to run the stage with `wrap(piece)` for every compilable piece; None if it compiles as a whole."""
        return None

    def forward_skipping_output(self) -> Run | None:
        """Return how to run the stage right before its backward, without its output; None if that saves nothing.

        The result has the graph, shapes and types of the usual output, but not its values.
        """
        return None

    ways_are_code = False
    """Whether its `ways` run different code, which may round differently. Then all runs of the stage in a plan use the
    way in which it is stored, also those that store nothing."""

    def ways(self) -> tuple[str, ...]:
        """Return the names of the partial storage modes. Each keeps less than those before it.

        A name is the text after "stored" in a report. Plan files contain it, so it must not change.
        """
        return ()

    def ways_for(self, value: Any) -> tuple[str, ...]:
        """Return those of its `ways` that apply to `value`; may run the stage to find out."""
        return self.ways()

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        """Return how to run the stage stored by one of its `ways`. With `skip_output`, the output has no values."""
        raise InvalidValueError(f"the stage has no way {way!r}", kind="unknown_way", name=way)


class _Joined(StageOffers):
    """Offers of stages that run one after the other as one: no partial storage modes, which would concern others."""

    def __init__(self, parts: Iterable[StageOffers]) -> None:
        self._parts = list(parts)
        if self._parts:
            self.carried = self._parts[-1].carried  # the output is that of the last one
            self.needs_gradient = self._parts[0].needs_gradient
            self.shared, self.last = self._parts[0].shared, self._parts[-1].last
        self.wiring = tuple(part.wiring for part in self._parts)
        self.saves_through_hooks = all(part.saves_through_hooks for part in self._parts)

    @property
    def parts(self) -> Sequence[StageOffers]:
        return [inner for part in self._parts for inner in part.parts]

    def gather_begun(self) -> None:
        for part in self._parts:
            part.gather_begun()

    def in_pieces(self, wrap: Wrap) -> Run | None:
        runs = [part.in_pieces(wrap) for part in self._parts]
        # Either all stages of a model are in pieces (sharded), or none.
        found = [run for run in runs if run is not None]
        return (lambda value: reduce(lambda made, run: run(made), found, value)) if found else None


_NOTHING = StageOffers()


def offers_of(function: Callable[..., Any]) -> StageOffers:
    """Return the offers of a module, of several joined in an `nn.Sequential`, or of any function."""
    if isinstance(function, StageOffers):
        return function
    if isinstance(function, nn.Sequential):
        return _Joined(offers_of(part) for part in function)
    return _NOTHING
