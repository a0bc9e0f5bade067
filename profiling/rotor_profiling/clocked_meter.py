"""A memory meter beside a stopwatch: runs that show bytes show seconds as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from rotor_profiling.memory import MemoryMeter, Phase
from rotor_profiling.timing import Stopwatch


class ClockedMeter:
    """`meter`, with the `seconds` of its phases by a `watch`, without those in which it marks them.

    Phases of one name add up. The phase that the end of the context ends has none, and without a watch, none has any.
    """

    def __init__(self, meter: MemoryMeter, watch: Stopwatch | None) -> None:
        self._meter, self._watch = meter, watch
        self._names = [""]
        self.seconds: dict[str, float] = {}

    @property
    def phases(self) -> dict[str, Phase]:
        """Those of the meter."""
        return self._meter.phases

    def mark(self, name: str) -> None:
        """Begin the phase `name`."""
        with self._uncounted(name):
            self._meter.mark(name)

    def hold(self, tensor: torch.Tensor) -> None:
        """As the meter does."""
        with self._uncounted(self._names[-1]):
            self._meter.hold(tensor)

    @contextmanager
    def _uncounted(self, then: str) -> Iterator[None]:
        """What happens in here takes no time; `then` is the phase that goes on, or begins."""
        if self._watch is not None:
            self._watch.lap()
        yield
        if self._watch is not None:
            self._watch.lap()
            self._names.append(then)

    def __enter__(self) -> ClockedMeter:
        self._meter.__enter__()
        if self._watch is not None:
            self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            laps = self._watch.stop()[::2]  # every other one does not count
            for name, seconds in zip(self._names, laps, strict=False):
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._meter.__exit__(kind, error, trace)
