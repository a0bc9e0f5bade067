"""How values are made again from others: by which operators, and inside of what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate


@dataclass(frozen=True, slots=True)
class Value:
    """A value in the arguments of a `Call`, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that makes a value again, from those that it `reads`.

    If `wanted` is not None, it runs with a graph, in which gradients are wanted of these values.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    wanted: frozenset[int] | None = None

    def __call__(self, values: Mapping[int, Any]) -> Any:
        """The value, made from `values`."""

        def read(each: Any) -> Any:
            if not isinstance(each, Value):
                return each
            found = values[each.number]
            return found.detach().requires_grad_() if self.wanted and each.number in self.wanted else found

        with torch.set_grad_enabled(self.wanted is not None):
            args, kwargs = map_aggregate((self.args, self.kwargs), read)
            made = self.function(*args, **kwargs)
        return made if self.wanted is None else made.detach()


Reading = Callable[[Collection[int]], None]
"""Called with the numbers of the values that a call is about to read: some may have to be brought into memory."""
Around = Callable[[], AbstractContextManager[Reading]]
"""What is around the making of values."""


def reading_all_there(numbers: Collection[int]) -> None:
    """The values that are read are in memory anyway."""


def nothing_around() -> AbstractContextManager[Reading]:
    """What is around the making of values that are in memory anyway."""
    return nullcontext(reading_all_there)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make values again: `calls` for them and for what is between, and the kept values that each `needs`."""

    calls: dict[int, Call]
    needs: dict[int, frozenset[int]]
