"""Run a chain to discover how recording a graph changes the stages' results, and which strides gradients have."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from rotor_profiling import Layouts, isolated, leaves_of, stage_layouts, stage_signature, tensors_in
from rotor_profiling.followed_storages import Touched
from rotor_profiling.stage.gradients import leaves_behind
from rotor_profiling.stage.stage_signature import HasKind
from rotor_profiling.storage import local, storages
from rotor_profiling.timing import several_processes
from rotor_py.distributed.processes import anywhere
from rotor_py.distributed.sharding import gathered
from rotor_py.errors import UnsupportedModelError
from rotor_py.measure.cut import Cut
from rotor_py.measure.fixed_memory import SteppedParameters
from rotor_py.stage.error_context import During
from rotor_py.stage.forward_state import GraphEffects, find_effects, remember_effects
from rotor_py.stage.protocol import Keeper, StageOffers, Trial, offers_of
from rotor_py.stage.runner import StageRunner, edges_and_owners
from rotor_solver.watching import Progress


class LayerOffers(Protocol):
    """Finds further storage modes of a layer from a run of it; `plan.source.LayerParts` implements this protocol."""

    def look_at(
        self, function: nn.Module, name: str, kind: Hashable, value: Any, device: torch.device, saved_bytes: int
    ) -> None: ...

    def of(self, function: nn.Module) -> StageOffers | None: ...


@dataclass(frozen=True, slots=True)
class WalkedChain:
    """The stages of `cut` on `device`, and `value`, the input of the first stage.

    `silent`: indices of the chain's output tensors that get no gradient. `group`: the processes that run the stages
    together. `keepers`: storage modes for all stages. `layer_offers`: finds further storage modes of layers.
    """

    cut: Cut
    value: Any
    device: torch.device
    silent: tuple[int, ...]
    group: dist.ProcessGroup | None
    preserve_rng_state: bool
    keepers: tuple[Keeper, ...]
    layer_offers: LayerOffers | None

    def runner(self, number: int, ways: Sequence[str] = ()) -> StageRunner:
        """Return a runner of stage `number` that stores everything, and whose `by(n)` uses the n-th mode of `ways`."""
        name, function = self.cut.stages[number]
        offers = None if self.layer_offers is None else self.layer_offers.of(function)
        return StageRunner(function, name, self.preserve_rng_state, ways=ways, keepers=self.keepers, offers=offers)

    def run(self, runner: StageRunner, value: Any) -> Any:
        """Run a stage; return its output as leaves with `requires_grad` as in training, for the next stage."""
        with isolated(runner.function, self.device, watch=True), torch.enable_grad():
            return leaves_of(runner.forward(leaves_of(value)))

    def silent_of(self, number: int) -> tuple[int, ...]:
        return self.silent if number == len(self.cut.stages) - 1 else ()


def _unlike(output: Sequence[tuple[torch.Size, tuple[int, ...]]], layouts: Layouts) -> Layouts:
    """Return `layouts` with None for each gradient that has the strides of its tensor in `output`; () if all have."""
    found = tuple(
        None if strides is None or _alike(shape, own, strides) else strides
        for (shape, own), strides in zip(output, layouts, strict=False)
    )
    return found if any(found) else ()


def _alike(shape: torch.Size, own: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two tuples of strides give this shape the same layout: those of dimensions of size 1 may differ."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, own, strides, strict=True))


def refuse_lost_gradients(
    name: str, function: nn.Module, value: Any, output: Any, parameters: Sequence[torch.Tensor]
) -> None:
    """Raise UnsupportedModelError if a stage uses a parameter that its module does not own, such as one in a list.

    A recomputed stage returns gradients only for the parameters that it owns.
    """
    known = {id(tensor) for tensor in (*tensors_in(value), *parameters)}
    lost = [each for each in leaves_behind(edges_and_owners(output)[0]) if id(each) not in known]
    if lost:  # ignore leaves that the forward makes: another run has others
        again = {id(each) for each in leaves_behind(edges_and_owners(function(value))[0])}
        lost = [each for each in lost if id(each) in again]
    if lost:
        stage = f"stage {name!r} ({type(function).__name__}), which uses it"
        text = (
            f"make the owner of a parameter of shape {tuple(lost[0].shape)} a submodule of {stage}: if the stage is "
            "recomputed, the parameter would get no gradient"
        )
        raise UnsupportedModelError(text, kind="foreign_parameter", name=name)


class DiscoveryPass:
    """Runs a chain in discovery passes, and keeps their findings. `stepped`: parameters stepped in the backward."""

    def __init__(self, chain: WalkedChain, stepped: SteppedParameters) -> None:
        self._stepped = stepped
        self._effects: dict[Hashable, GraphEffects] = {}
        self._trials: dict[Hashable, dict[str, Trial]] = {}
        # Maps a result of `_asked` (a stage's signature, layouts of its output's gradients) to the layouts of the
        # gradients that the stage's backward returns.
        self._given: dict[Hashable, Layouts] = {}
        # Maps each stage's index to whether each tensor of its output requires a gradient in training.
        self.needs_gradient: dict[int, list[bool]] = {}
        self._chain, self._stages = chain, chain.cut.stages
        self._alike: dict[int, Hashable] = {}  # maps each stage's index to its signature, without layouts of gradients
        # For each stage, the layouts of its output's gradients with which it is measured; () if they are those of the
        # output, as is assumed until the next stage has run. A wrong layout might cost its backward an extra copy.
        self.arriving: list[Layouts] = [()] * len(self._stages)
        # For each stage, and then for the loss, the layouts of the gradients that its backward returns.
        self._arrived: list[Layouts] = [()] * (len(self._stages) + 1)
        # For each stage, shape and strides of each output tensor; of a sharded tensor, those of the local shard.
        self._outputs: list[list[tuple[torch.Size, tuple[int, ...]]]] = [[] for _ in self._stages]

    def of(self, chain: WalkedChain) -> DiscoveryPass:
        """Return a discovery pass for `chain`, the same stages with other code. Both share findings by signature."""
        other = DiscoveryPass(chain, self._stepped)
        other._effects, other._trials, other._given = self._effects, self._trials, self._given
        return other

    def paying(self, number: int) -> set[str]:
        return {name for name, trial in self._trials[self._alike[number]].items() if trial.pays}

    def walk(self, progress: Progress | None = None, last: int | None = None) -> Any:
        """Run the stages up to the index `last`, by default all; return the output of the last one."""
        value = self._chain.value
        for number, (name, _) in enumerate(self._stages[: None if last is None else last + 1]):
            if progress is not None:
                progress(0, len(self._stages), name)
            value = self._pass(number, value)
        return value

    def settle(self, of_output: Layouts | None = None) -> bool:
        """Repeat passes until all gradients' layouts are known, given the loss's; return whether any has changed."""
        if of_output is not None:
            self._arrived[-1] = of_output
        chain, before = self._chain, list(self.arriving)
        # Each pass finds the final layouts of at least one more stage, since they depend only on later stages.
        while anywhere((last := self._last_to_run_again()) is not None, chain.group, chain.device):
            # Several processes must run equally many stages, but may have different `last`: let each run all.
            self.walk(last=None if several_processes() else last)
        return anywhere(self.arriving != before, chain.group, chain.device)

    def _last_to_run_again(self) -> int | None:
        """Return the index of the last stage to run again; None if none has to. A stage has to if the gradients of its
        output have other layouts than assumed in its run. Of equal stages, only the first one runs, and the others take
        its findings; so do those whose layouts an earlier run had.
        """
        again: dict[int, Layouts] = {}
        for stage in reversed(range(len(self._stages))):
            due = _unlike(self._outputs[stage], self._arrived[stage + 1])
            if due == self.arriving[stage]:
                continue
            asked = self._asked(stage, due)
            if (given := self._given.get(asked)) is None:
                again[next(each for each in range(stage + 1) if self._asked(each, due) == asked)] = due
            else:
                self.arriving[stage], self._arrived[stage] = due, self._with_handed_on(stage, given, due)
        for stage, due in again.items():
            self.arriving[stage] = due
        return max(again, default=None)

    def _asked(self, number: int, arriving: Layouts) -> Hashable:
        passed = tuple(offers_of(self._stages[number][1]).handed_on.items())
        return self._alike[number], self._chain.silent_of(number), passed, self._to_run(number, arriving)

    def _to_run(self, number: int, arriving: Layouts) -> Layouts:
        """Return `arriving` with None for tensors that the stage only passes on, whose layouts change no cost of it."""
        passed = offers_of(self._stages[number][1]).handed_on
        found = tuple(None if position in passed else each for position, each in enumerate(arriving))
        return found if any(found) else ()

    def _with_handed_on(self, number: int, given: Layouts, arriving: Layouts) -> Layouts:
        """Return `given`, the layouts of the input's gradients, with those of `arriving` for tensors only passed on."""
        found = list(given)
        for end, begin in offers_of(self._stages[number][1]).handed_on.items():
            if end < len(arriving) and arriving[end] is not None and found[begin] is not None:
                found[begin] = arriving[end]
        return tuple(found)

    def _pass(self, number: int, value: Any) -> Any:
        name, function = self._stages[number]
        chain = self._chain
        with gathered(function, chain.cut.sharding):
            alike = stage_signature(function, value)
            # The stage may contain collectives, so if its signature is new in one process, run it in all.
            new = anywhere(alike not in self._effects, chain.group, chain.device)
            self._alike[number] = alike
            arriving = self.arriving[number]
            asked = self._asked(number, arriving)
            made = None
            with During("measuring", name):
                if new or anywhere(asked not in self._given, chain.group, chain.device):
                    self._given[asked], made = self._run(number, value, new=new)
                if new:
                    self._effects[alike] = find_effects(function, value, made, chain.device)
                    if self._stepped:
                        self._refuse_foreign_parameters(number, value)
                remember_effects(function, self._effects[alike])
                if chain.layer_offers is not None:
                    saved = max((trial.saved_bytes for trial in self._trials[alike].values()), default=0)
                    chain.layer_offers.look_at(function, name, alike, value, chain.device, saved)
            # If its signature and layouts are known, the stage has not run above: run it for the next stage's input.
            value = chain.run(chain.runner(number), value) if made is None else made
            self._arrived[number] = self._with_handed_on(number, self._given[asked], arriving)
            self._outputs[number] = [(tensor.shape, tensor.stride()) for tensor in map(local, tensors_in(value))]
        self.needs_gradient[number] = [tensor.requires_grad for tensor in tensors_in(value)]
        return value

    def _run(self, number: int, value: Any, *, new: bool) -> tuple[Layouts, Any]:
        chain, (name, function) = self._chain, self._stages[number]
        runner, trials = chain.runner(number), self._trials.setdefault(self._alike[number], {})
        # A captured stage owns all parameters that it uses: do not check it.
        check = partial(refuse_lost_gradients, name, function) if new and not isinstance(function, HasKind) else None
        layouts = partial(
            stage_layouts,
            runner,
            value,
            chain.device,
            silent=chain.silent_of(number),
            arriving=self._to_run(number, self.arriving[number]),
            before_backward=check or (lambda *_: None),
        )

        def tried(keeper: Keeper, value: Any) -> Any:
            made: list[Any] = []

            def run(value: Any) -> Any:
                made[:] = [runner.forward(value)]
                return made[0]

            trials[keeper.name] = keeper.trial(run, function, value)
            return made.pop() if made else runner.forward(value)

        found = None
        # Trials use saved-tensor hooks, and autograd calls only the innermost ones. So each has a run of its own.
        for keeper in (each for each in runner.suiting if new and not each.keeps_the_rest):
            # torch.func transforms refuse hooks; any other error is raised again by the run below.
            with suppress(RuntimeError):
                found = layouts(forward=partial(tried, keeper))
        return found or layouts()

    def _refuse_foreign_parameters(self, number: int, value: Any) -> None:
        name, function = self._stages[number]
        own = storages([*function.parameters(), *tensors_in(value)])
        with Touched(each for each in self._stepped.parameters if own.keys().isdisjoint(storages([each]))) as reads:
            self._chain.run(self._chain.runner(number), value)
        if reads.found:
            stage = f"stage {name!r}, which reads it, or leave step_in_backward out"
            text = f"make the owner of a parameter of shape {tuple(reads.found[0].shape)} a submodule of {stage}"
            raise UnsupportedModelError(text, kind="foreign_parameter", name=name)
