"""What a stage may offer beside its forward: other ways to run it, and what has to be known to run it by itself.

A layer of the user's offers nothing; it is run, and that is all. A stage that was generated from a captured graph knows
more about itself, and says so by deriving from `StageOffers`. Everybody who makes use of an offer asks `offers_of`, so
that this file is the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

from torch import nn

from rotor_py.errors import InvalidValueError

Run = Callable[[Any], Any]
"""A way to run a stage: from its input to its output."""

RunThrough = Callable[[list[Any], Callable[[int], str]], tuple[Any, ...]]
"""A way to run several stages as one, in the graph around them.

It is called with the input of the first in a list, which it empties, and with what names a stage by its number, for
errors. It returns the output of the last, without what the stages share."""

Wrap = Callable[[nn.Module], nn.Module]
"""What a piece of a stage is replaced by."""


class StageOffers:
    """What a stage offers. Every default offers nothing, so that a stage defines only what it has."""

    carried: Mapping[str, int] = MappingProxyType({})
    """The tensors of the output that are handed on beside the chain: name, and position among the output's tensors."""

    handed_on: Mapping[int, int] = MappingProxyType({})
    """The tensors of the output that are some of the input, and that the stage does not use otherwise: the position
    among the output's tensors, and that among the input's. Their gradients pass through its backward as they are."""

    wiring: Hashable = None
    """Which values of its input the stage reads and which it hands on, by position. Stages of one kind
    (`stage_signature`) cost the same whichever values they read, but code that was compiled for one reads what that one
    does."""

    makes_its_own: bool = False
    """Whether it is known without a run that it writes into nothing that it is given, and that not all of its output
    lies there."""

    needs_gradient: Sequence[bool] | None = None
    """Of every tensor in its input, whether it needs a gradient in training; None if that shows when the stage runs."""

    saves_through_hooks = True
    """Whether saved-tensor hooks that are there during a run see what autograd saves."""

    shared: int = 0
    """How many values at the end of its input all stages of the chain share."""

    last: bool = True
    """Whether its output is that of the chain, without what the stages share."""

    @property
    def parts(self) -> Sequence[StageOffers]:
        """The stages that are joined in this one, in turn."""
        return (self,)

    def run_through(self, following: Sequence[StageOffers]) -> RunThrough | None:
        """How to run the stage and those that follow it as one; None if they have to run one by one."""
        return None

    def gather_begun(self) -> None:
        """Gather the sharded parameters of modules that have begun before this stage.

        The stage gathers the others when their modules begin in it, and lets go of all where their modules end.
        """

    def in_pieces(self, wrap: Wrap) -> Run | None:
        """How to run the stage with `wrap(piece)` in the place of every piece that can be compiled.

        None if the stage can be compiled as a whole. If it cannot, this is called once for each way to wrap the pieces.
        """
        return None

    def forward_skipping_output(self) -> Run | None:
        """How to run the stage right before its backward, when nobody reads its output; None if that saves nothing.

        What the run returns has the graph, the shapes and the types of the usual output, but not its values.
        """
        return None

    ways_are_code = False
    """Whether each of its `ways` is other code, which may round otherwise: then all runs of the stage in a plan are by
    the way in which it is stored, also those that store nothing."""

    def ways(self) -> tuple[str, ...]:
        """The names of the ways to store the stage other than whole. Each of them keeps less than those before it.

        A name is what follows "stored" in a report. It is written into plans, so it must not change.
        """
        return ()

    def ways_for(self, value: Any) -> tuple[str, ...]:
        """Those of its `ways` that can be taken on `value`; the stage may be run to find that out."""
        return self.ways()

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        """How to run the stage so that it is stored by one of its `ways`.

        With `skip_output`, the output has no values, as in `forward_skipping_output`.
        """
        raise InvalidValueError(f"the stage has no way {way!r}", kind="unknown_way", name=way)


class _Joined(StageOffers):
    """What stages offer that are run one after the other as one.

    No other way to run them is offered: each way belongs to one of them, and its neighbours would have to follow.
    """

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
        # All stages of a sharded model are in pieces, and none of another one.
        found = [run for run in runs if run is not None]
        return (lambda value: reduce(lambda made, run: run(made), found, value)) if found else None


_NOTHING = StageOffers()


def offers_of(function: Callable[..., Any]) -> StageOffers:
    """What a stage offers: a module, several joined in an `nn.Sequential`, or any function."""
    if isinstance(function, StageOffers):
        return function
    if isinstance(function, nn.Sequential):
        return _Joined(offers_of(part) for part in function)
    return _NOTHING
