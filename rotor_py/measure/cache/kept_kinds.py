"""What was found of kinds of stages, kept for the next run of a program: bytes and seconds.

What the first walk finds is not kept. Whether a stage's numbers depend on the graph may be seen with some weights and
not with others, so every model is looked at anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict
from typing import Any

from rotor_profiling import StageBytes
from rotor_profiling.stage.seconds import StageRun
from rotor_py.errors import InvalidValueError
from rotor_py.measure.cache.measurement_cache import MeasurementCache
from rotor_py.measure.walks.found import Runs, Weighed

_UNREADABLE = (KeyError, TypeError, ValueError)
"""What a file raises that somebody has written into."""


class KeptKinds:
    """What `cache` knows of kinds of stages: nothing without one."""

    def __init__(self, cache: MeasurementCache | None) -> None:
        self._cache = cache
        if cache is not None:
            cache.make_room()

    def measured(self, kind: Hashable) -> tuple[Weighed, Runs] | None:
        """What the other walks of an earlier run have found: bytes and seconds."""
        data = self._find("measured", kind)
        try:
            return None if data is None else (_weighed(data), tuple(map(_run, data["runs"])))
        except _UNREADABLE:
            return None

    def keep_measured(self, kind: Hashable, found: Weighed, runs: Runs) -> None:
        """Keep what the other walks have found."""
        data = {
            "bytes": [asdict(way) for way in found.bytes],
            "ways": list(found.ways),
            "decided_bytes": found.decided_bytes,
            "moving": sorted(found.moving),
            "undecided": found.undecided,
            "runs": [asdict(run) for run in runs],
        }
        self._keep("measured", kind, data)

    def _find(self, what: str, kind: Hashable) -> dict[str, Any] | None:
        return None if self._cache is None else self._cache.find((what, kind))

    def _keep(self, what: str, kind: Hashable, data: dict[str, Any]) -> None:
        if self._cache is not None:
            self._cache.keep((what, kind), data)


def _weighed(data: dict[str, Any]) -> Weighed:
    found = tuple(
        StageBytes(**{**way, "gradient_storage_bytes": tuple(map(int, way["gradient_storage_bytes"]))})
        for way in data["bytes"]
    )
    ways = tuple(map(str, data["ways"]))
    if len(found) != 1 + len(ways) or all(run["node"] is None for run in data["runs"]):
        raise InvalidValueError(
            "a stage is stored whole, and in each of its ways, and was run", kind="bad_field", name="kinds"
        )
    return Weighed(
        found, int(data["decided_bytes"]), frozenset(map(int, data["moving"])), ways, bool(data.get("undecided"))
    )


def _run(data: dict[str, Any]) -> StageRun:
    ways = tuple((float(forward), float(backward)) for forward, backward in data["ways"])
    node = data["node"]
    if node is not None:
        forward, backward = map(float, node)
        node = forward, backward
    return StageRun(ways, node)
