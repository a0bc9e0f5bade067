"""The runners of a chain of stages, each made when somebody asks for it: stages that run as one function need none.

They are those of a plan, and serve all of its forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import overload

from rotor_py.execute.whole_runs import JoinedRun, NamedStage, joined_run
from rotor_py.stage.runner import StageRunner

_WHOLE: Mapping[int, int] = MappingProxyType({})


class Runners(Sequence[StageRunner]):
    """One runner for each of `stages`; `make` is called with the number of a stage, once.

    `options` are those by which they are stored, without those that are stored whole.
    """

    def __init__(
        self,
        stages: Sequence[NamedStage],
        make: Callable[[int], StageRunner],
        options: Mapping[int, int] = _WHOLE,
    ) -> None:
        self.stages = stages
        self.options = options
        self._make = make
        self._made: dict[int, StageRunner] = {}
        self._joined: dict[tuple[int, int], JoinedRun | None] = {}

    @classmethod
    def of(cls, runners: Sequence[StageRunner]) -> Runners:
        """Those that are made already, or others that are not."""
        if isinstance(runners, Runners):
            return runners
        return cls([(each.name, each.function) for each in runners], runners.__getitem__)

    def by(self, options: Mapping[int, int]) -> Runners:
        """The same stages, each by its option in `options`, or by 0. ValueError if a stage has no such option."""
        if options is self.options:
            return self
        found = Runners(self.stages, lambda stage: self[stage].by(options.get(stage, 0)), options)
        for stage in options:  # before anything has run
            found[stage]
        return found

    def joined(self, first: int, stop: int) -> JoinedRun | None:
        """How to run the stages from `first` to before `stop` as one; None if they cannot."""
        key = first, stop
        if key not in self._joined:
            self._joined[key] = joined_run(self.stages[first:stop])
        return self._joined[key]

    def __len__(self) -> int:
        return len(self.stages)

    @overload
    def __getitem__(self, index: int) -> StageRunner: ...

    @overload
    def __getitem__(self, index: slice) -> list[StageRunner]: ...

    def __getitem__(self, index: int | slice) -> StageRunner | list[StageRunner]:
        if isinstance(index, slice):
            return [self[stage] for stage in range(len(self.stages))[index]]
        found = self._made.get(index)
        if found is None:
            stage = range(len(self.stages))[index]  # IndexError at the end, where an iteration stops
            found = self._made.get(stage) or self._make(stage)
            self._made[stage] = found
        return found
