"""The first walks: what a run without a graph would not show, and the layouts of gradients, until these are settled."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from rotor_profiling import Layouts, isolated, leaves_of, stage_kind, stage_layouts, tensors_in
from rotor_profiling.stage.kind import HasKind
from rotor_profiling.timing import several_processes
from rotor_py.distributed.processes import anywhere
from rotor_py.distributed.whole_parameters import gathered
from rotor_py.errors import UnsupportedModelError
from rotor_py.measure.stepped_parameters import SteppedParameters
from rotor_py.measure.walks.gradient_layouts import GradientLayouts
from rotor_py.measure.walks.lost_gradients import LostGradients
from rotor_py.measure.walks.walked_chain import WalkedChain
from rotor_py.stage.activity import During
from rotor_py.stage.foreign_parameters import ForeignParameters
from rotor_py.stage.graph_effects import GraphEffects, find_effects, remember_effects
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.steady import Steady, remember_steady
from rotor_py.stage.ways.keeper import Trial
from rotor_solver.progress import Progress


class Survey:
    """What the first walks find of the stages of a chain. The backward steps the parameters in `stepped`."""

    def __init__(self, chain: WalkedChain, stepped: SteppedParameters) -> None:
        self._stepped = stepped
        self._effects: dict[Hashable, tuple[GraphEffects, Steady | None]] = {}
        self._trials: dict[Hashable, Mapping[str, Trial]] = {}
        self._given: dict[Hashable, Layouts] = {}
        """The layouts of the gradients of a stage's input, by its kind and those of the gradients that arrive, but of
        tensors that it only hands on."""
        self.needs_gradient: dict[int, list[bool]] = {}
        """Which tensors of a stage's output need a gradient in training."""
        self._chain = chain
        self._stages = chain.cut.stages
        self._layouts = GradientLayouts(len(self._stages))
        self._alike: dict[int, Hashable] = {}
        """The kind of each stage, whatever gradients arrive there."""

    def of(self, chain: WalkedChain) -> Survey:
        """A survey of the same chain, run in another way, with what is known of kinds of stages."""
        other = Survey(chain, self._stepped)
        other._effects, other._trials, other._given = self._effects, self._trials, self._given
        return other

    @property
    def arriving(self) -> list[Layouts]:
        """The layouts of the gradients that arrive at each stage."""
        return self._layouts.arriving

    def paying(self, number: int) -> set[str]:
        """The keepers by which a stage is worth storing, by their names."""
        return {name for name, trial in self._trials[self._alike[number]].items() if trial.pays}

    def laid_out_as_with_a_graph(self, number: int, output: Any) -> bool:
        """Whether a run of a stage without a graph has made an output that is laid out as one with a graph was."""
        return self._layouts.laid_out_as_noted(number, tensors_in(output))

    def give_output(self, layouts: Layouts) -> None:
        """The gradients of the chain's output have these layouts."""
        self._layouts.give_output(layouts)

    def walk(self, progress: Progress | None = None, last: int | None = None) -> Any:
        """A walk up to the stage `last`; returns its output, by default the chain's."""
        value = self._chain.value
        for number, (name, _) in enumerate(self._stages[: None if last is None else last + 1]):
            if progress is not None:
                progress(0, len(self._stages), name)
            value = self._pass(number, value)
        return value

    def settle(self) -> bool:
        """Walk until gradients arrive in the layouts that are known; whether they did not before."""
        chain, before = self._chain, list(self.arriving)
        # This ends: the gradients of a stage depend on the stages after it alone, so every walk settles one more.
        while anywhere((last := self._layouts.last_that_differs(self._known)) is not None, chain.group, chain.device):
            self._layouts.take_over()
            # Processes have to run equally many stages, and others may differ at later ones.
            self.walk(last=None if several_processes() else last)
        return anywhere(self.arriving != before, chain.group, chain.device)

    def _known(self, number: int, arriving: Layouts) -> Layouts | None:
        """The layouts that a stage gives if gradients arrive like this; None if no stage of its kind has shown that."""
        given = self._given.get(self._asked(number, arriving))
        return None if given is None else self._with_handed_on(number, given, arriving)

    def _asked(self, number: int, arriving: Layouts) -> Hashable:
        """What the layouts that a stage gives are known by."""
        passed = tuple(self._handed_on(number).items())
        return self._alike[number], self._chain.silent_of(number), passed, self._to_run(number, arriving)

    def _handed_on(self, number: int) -> Mapping[int, int]:
        return offers_of(self._stages[number][1]).handed_on

    def _to_run(self, number: int, arriving: Layouts) -> Layouts:
        """Of the gradients that arrive, the layouts on which it depends what the stage gives."""
        passed = self._handed_on(number)
        found = tuple(None if position in passed else each for position, each in enumerate(arriving))
        return found if any(found) else ()

    def _with_handed_on(self, number: int, given: Layouts, arriving: Layouts) -> Layouts:
        """The layouts that a stage gives, with those that only pass through it."""
        found = list(given)
        for end, begin in self._handed_on(number).items():
            if end < len(arriving) and arriving[end] is not None and found[begin] is not None:
                found[begin] = arriving[end]
        return tuple(found)

    def _pass(self, number: int, value: Any) -> Any:
        """Look at a stage unless its kind is known; returns its output, the input of the next one."""
        name, function = self._stages[number]
        chain = self._chain
        with gathered(function, chain.cut.sharding):
            alike = stage_kind(function, value)
            # Where stages wait for other processes, all of them run a stage that is new to any of them.
            new = anywhere(alike not in self._effects, chain.group, chain.device)
            self._alike[number] = alike
            arriving = self.arriving[number]
            asked = self._asked(number, arriving)
            made = None
            with During("measuring", name):
                if new:
                    self._trials[alike] = chain.runner(number).trials()
                if new or anywhere(asked not in self._given, chain.group, chain.device):
                    self._given[asked], made = self._run(number, value, new=new)
                if new:
                    recorded = chain.runner(number).recorded(value)
                    self._effects[alike] = find_effects(function, value, made, chain.device, recorded)
                    if self._stepped:
                        self._refuse_foreign_parameters(number, value)
                effects, steady = self._effects[alike]
                remember_effects(function, effects)
                remember_steady(function, steady)
                if chain.layer_offers is not None:
                    saved = max((trial.saved_bytes or 0 for trial in self._trials[alike].values()), default=0)
                    chain.layer_offers.look_at(function, name, alike, value, chain.device, saved)
            # A stage of a known kind did not run, and its numbers are its own.
            value = chain.run(chain.runner(number), value) if made is None else made
            given = self._with_handed_on(number, self._given[asked], arriving)
            self._layouts.note(number, given, tensors_in(value))
        self.needs_gradient[number] = [tensor.requires_grad for tensor in tensors_in(value)]
        return value

    def _run(self, number: int, value: Any, *, new: bool) -> tuple[Layouts, Any]:
        """The layouts that a stage gives, and its output; if it is `new`, keepers are tried."""
        chain, (name, function) = self._chain, self._stages[number]
        runner, trials = chain.runner(number), list(self._trials[self._alike[number]].values()) if new else []
        # A captured stage says all that it does, and has all parameters that it uses.
        lost = LostGradients(name, function) if new and not isinstance(function, HasKind) else None
        run = partial(
            stage_layouts,
            runner,
            value,
            chain.device,
            silent=chain.silent_of(number),
            arriving=self._to_run(number, self.arriving[number]),
            before_backward=None if lost is None else lost.refuse,
        )
        # Of hooks inside of each other, autograd calls the innermost alone. And no process must run a stage again that
        # others do not.
        together = trials[:1] if not several_processes() else []
        for trial in trials[len(together) :]:
            with suppress(RuntimeError), isolated(function, chain.device), torch.enable_grad():
                trial.watch(runner.forward)(leaves_of(value))
        for trial in together:
            try:
                return run(watch=trial.watch)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                continue  # transforms of torch.func refuse hooks; what fails without hooks, too, fails again
        return run()

    def _refuse_foreign_parameters(self, number: int, value: Any) -> None:
        """UnsupportedModelError if a stage reads a parameter that it does not have and that the backward steps."""
        name, function = self._stages[number]
        with ForeignParameters(function, self._stepped.parameters) as reads:
            self._chain.run(self._chain.runner(number), value)
        if reads.found:
            raise UnsupportedModelError(
                f"stage {name!r} reads a parameter of shape {tuple(reads.found[0].shape)} that is not its own, and "
                "step_in_backward may have stepped it before the stage is run again; make its owner a submodule of the "
                "stage, or leave step_in_backward out",
                kind="foreign_parameter",
                name=name,
            )
