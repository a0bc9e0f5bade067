"""The runners of a chain of stages, each made when somebody asks for it: stages that run as one function need none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from rotor_py.stage.runner import StageRunner

NamedStage = tuple[str, Callable[..., Any]]


class Runners(Sequence[StageRunner]):
    """One runner for each of `stages`, which share `context`; `make` is called with the number of a stage, once."""

    def __init__(
        self, stages: Sequence[NamedStage], context: tuple[Any, ...], make: Callable[[int], StageRunner]
    ) -> None:
        self.stages = stages
        self.context = context
        self._make = make
        self._made: dict[int, StageRunner] = {}

    @classmethod
    def of(cls, runners: Sequence[StageRunner]) -> Runners:
        """Those that are made already, or others that are not."""
        if isinstance(runners, Runners):
            return runners
        context = runners[0].context if runners else ()
        return cls([(each.name, each.function) for each in runners], context, runners.__getitem__)

    def by(self, options: Mapping[int, int]) -> Runners:
        """The same stages, each by its option in `options`, or by 0. ValueError if a stage has no such option."""
        found = Runners(self.stages, self.context, lambda stage: self[stage].by(options.get(stage, 0)))
        for stage in options:  # before anything has run
            found[stage]
        return found

    def __len__(self) -> int:
        return len(self.stages)

    @overload
    def __getitem__(self, index: int) -> StageRunner: ...

    @overload
    def __getitem__(self, index: slice) -> list[StageRunner]: ...

    def __getitem__(self, index: int | slice) -> StageRunner | list[StageRunner]:
        if isinstance(index, slice):
            return [self[stage] for stage in range(len(self.stages))[index]]
        stage = range(len(self.stages))[index]  # IndexError at the end, where an iteration stops
        found = self._made.get(stage)
        if found is None:
            found = self._made[stage] = self._make(stage)
        return found
