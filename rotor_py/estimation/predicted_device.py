"""Measuring instruments for a simulated device: a stopwatch and a memory meter for fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from rotor_profiling.backends import Storages
from rotor_profiling.followed_storages import LiveBytes, OperatorBytes, no_scratch
from rotor_profiling.memory import MemoryMeter, Phase
from rotor_profiling.timing import Stopwatch
from rotor_profiling.torch_compat import TorchDispatchMode

OperatorSeconds = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]
"""Predicted seconds of (operator, arguments, keywords, result)."""


class PredictedStopwatch(TorchDispatchMode):
    """Adds up the `seconds` of operators called while the mode is active."""

    exact = True

    def __init__(self, seconds: OperatorSeconds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._seconds = seconds
        self._lap = 0.0
        self._laps: list[float] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let TorchDynamo capture inside the mode: its graphs run operator by operator, and are timed."""
        return True

    def start(self) -> None:
        self._lap, self._laps = 0.0, []

    def lap(self) -> None:
        self._laps.append(self._lap)
        self._lap = 0.0

    def stop(self) -> list[float]:
        return self._laps

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._lap += self._seconds(func, args, kwargs, result)
        return result


class PredictedMeter:
    """Bytes of storages created while the meter runs, and scratch memory of kernels.

    Like the other meters, it ignores frees of older storages.
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
        self.phases[self._name] = Phase(self._start, live.peak, live.now)
        self._name, self._start = name, live.now
        live.begin_peak()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if error is None:
            self.mark("")  # ends the last phase; the one that it begins is never read


_FAKE = Storages(1, fake=True)


@dataclass(frozen=True, slots=True)
class PredictedDevice:
    """A simulated device of some `kind` with `memory_bytes` free, of which libraries use `workspace_bytes`.

    It is one of `count` like devices that train one model together. `host_bandwidth` holds the bytes a second of copies
    to the host and back, both directions at once.

    `seconds` and `scratch` predict each operator. Tensors are fake ones on the CPU for every kind, since PyTorch runs
    no backward for an absent device. While stages run, `chosen` is entered, which selects the operators of that kind.
    """

    kind: str
    memory_bytes: int
    seconds: OperatorSeconds
    scratch: OperatorBytes = no_scratch
    workspace_bytes: int = 0
    storages: Storages = _FAKE
    name: str = "a device that is not here"
    count: int = 1
    host_bandwidth: float = 1e9
    chosen: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def all_names(self) -> str:
        return self.name if self.count == 1 else f"{self.count} × {self.name}"

    def memory_meter(self, device: torch.device) -> MemoryMeter:
        return PredictedMeter(LiveBytes({device.type}, self.kind, self.scratch))

    def stopwatch(self, device: torch.device) -> AbstractContextManager[Stopwatch]:
        return PredictedStopwatch(self.seconds)

    def operators(self) -> AbstractContextManager[object]:
        return self.chosen()
