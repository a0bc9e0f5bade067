"""The names of ways to store a stage: what it does by itself, what keepers do, or one after the other."""

from __future__ import annotations

from collections.abc import Collection, Container

_AND = ", "


def both(own: str, keeper: str) -> str:
    """The way in which a stage is stored in its `own` way, or in one with a keeper, and what that saves by a keeper."""
    return f"{own}{_AND}{keeper}"


def parted(way: str, keepers: Container[str]) -> tuple[str | None, str | None]:
    """A way without its last keeper, and the name of that keeper; None for what has no part in it."""
    if way in keepers:
        return None, way
    own, _, keeper = way.rpartition(_AND)
    return (own, keeper) if keeper in keepers and own else (way, None)


def own_of(way: str, keepers: Container[str]) -> str | None:
    """What the stage does by itself in a way; None if that is nothing."""
    before, keeper = parted(way, keepers)
    return before if keeper is None or before is None else own_of(before, keepers)


def base_of(way: str, ways: Collection[str]) -> str | None:
    """The one of `ways` that `way` adds a keeper to; None if it adds one to the whole stage, or none.

    Ways that add a keeper come with the keeper alone, as one of `ways`. Else, what follows is a part of the name.
    """
    base, _, keeper = way.rpartition(_AND)
    return base if base in ways and keeper in ways else None
