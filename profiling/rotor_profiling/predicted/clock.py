"""A stopwatch for operators that do not really run: the sum of the seconds that each would take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OperatorSeconds = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]
"""Seconds that an operator would take: of (operator, arguments, keywords, result)."""


class PredictedStopwatch(TorchDispatchMode):
    """Adds up the `seconds` of the operators that are called while the mode is active."""

    exact = True
    waiting = 0.0

    def __init__(self, seconds: OperatorSeconds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._seconds = seconds
        self._lap = 0.0
        self._laps: list[float] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Inside, TorchDynamo goes on: its graphs run operator by operator, and are timed."""
        return True

    def start(self) -> None:
        self._lap, self._laps = 0.0, []

    def lap(self) -> None:
        self._laps.append(self._lap)
        self._lap = 0.0

    def warm(self, tensors: Iterable[torch.Tensor]) -> None: ...

    def cool(self) -> None: ...

    def stop(self) -> list[float]:
        return self._laps

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._lap += self._seconds(func, args, kwargs, result)
        return result
