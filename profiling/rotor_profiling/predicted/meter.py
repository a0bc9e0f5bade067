"""A memory meter for tensors without memory: it counts their storages from outside."""

from __future__ import annotations

from types import TracebackType

import torch

from rotor_profiling.live_bytes import LiveBytes
from rotor_profiling.memory import Phase


class PredictedMeter:
    """What storages would take that are created while the meter runs, and what kernels would need beside them.

    As with the other meters, what is older than the meter is not counted when it is freed.
    """

    def __init__(self, live: LiveBytes) -> None:
        self.phases: dict[str, Phase] = {}
        self._live = live
        self._name, self._start = "", 0

    def __enter__(self) -> PredictedMeter:
        self._live.__enter__()
        return self

    def mark(self, name: str) -> None:
        live = self._live
        live.settle()
        self.phases[self._name] = Phase(self._start, live.peak, live.now, live.peak_with_held)
        self._name, self._start = name, live.now
        live.begin_peak()

    def hold(self, tensor: torch.Tensor) -> None:
        """As the other meters do."""
        self._live.hold(tensor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if error is None:
            self.mark("")  # ends the last phase; the one that it begins is never read
