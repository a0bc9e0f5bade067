"""Measure the stages of a chain one by one, in several passes, each from the first stage on.

At any time, at most one stage has an autograd graph, as in the plan of lowest peak, and no checkpoint is in memory.

 1. Discovery passes find effects of recording a graph, and are repeated until the layouts of gradients are known.
 2. One pass measures the bytes of one stage of each signature, and times it.
 3. Further passes time stages (`rounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rotor_profiling import (
    Layouts,
    LossCost,
    StageContext,
    StageCost,
    bytes_like,
    isolated,
    leaves_of,
    loss_layouts,
    measure_loss,
    measure_ways,
    stage_signature,
    storage_bytes,
    storages,
    tensors_in,
    time_ways,
    view_bytes,
)
from rotor_profiling.attributes import kept_bytes
from rotor_profiling.backends import stopwatch
from rotor_profiling.isolate import trained_parameters, writes_parameters
from rotor_profiling.stage.seconds import AsNode, StageRun
from rotor_profiling.storage import allocated
from rotor_py.distributed.processes import anywhere
from rotor_py.distributed.sharding import gathered
from rotor_py.measure.cache import StageFindings, measurement_cache
from rotor_py.measure.cut import Cut, run_prefix
from rotor_py.measure.discovery_pass import DiscoveryPass, LayerOffers, WalkedChain
from rotor_py.measure.fixed_memory import NONE_STEPPED, SteppedParameters
from rotor_py.measure.measurement import Carried, Measurement, Way
from rotor_py.measure.rounds import StageTimes
from rotor_py.measure.stage_ways import (
    offered_everywhere,
    offloadable_bytes,
    saving_ones,
    with_offloading,
    worth_choosing,
)
from rotor_py.stage.compression import word_of
from rotor_py.stage.error_context import During
from rotor_py.stage.forward_state import (
    moving_buffers,
    recall_effects,
    recall_moving,
    remember_moved_elsewhere,
    remember_moving,
)
from rotor_py.stage.named_state import named_values
from rotor_py.stage.protocol import ELSEWHERE, Keeper, both, offers_of
from rotor_py.stage.replayed_routing import decided_bytes, decides_nothing, remember_undecided
from rotor_py.stage.runner import StageRunner
from rotor_solver.watching import Progress


class CarriedTensors:
    """Tracks carried tensors from stage to stage: `now` maps their names to indices of tensors in the current input."""

    def __init__(self) -> None:
        self.now: Mapping[str, int] = {}
        self.found: dict[str, Carried] = {}
        self._alive: dict[str, set[int]] = {}  # addresses of carried tensors' storages in the current input

    @property
    def addresses(self) -> list[int]:
        """Addresses of the storages of carried tensors in the current stage's input, also of those it views."""
        return [address for addresses in self._alive.values() for address in addresses]

    def count_gradients(self, sizes: Sequence[int]) -> None:
        """Record the bytes of carried tensors' gradients; `sizes` has those of all tensors of the stage's input."""
        # Take the maximum over stages, since each may return a gradient in a storage of another size.
        for name, position in self.now.items():
            known = self.found[name]
            self.found[name] = replace(known, gradient_bytes=max(sizes[position], known.gradient_bytes))

    def pass_on(self, positions: Mapping[str, int], value: Any, stage: int, owned: Sequence[int]) -> None:
        """Go on to `stage`, whose input `value` has carried tensors at `positions`. `owned` storages do not count."""
        self.now, tensors = positions, tensors_in(value)
        for name, position in positions.items():
            if name not in self.found:
                self.found[name] = Carried(storage_bytes([tensors[position]], owned), stage, stage)
            self._alive[name] = {*storages([tensors[position]])}
        # A view of a carried tensor keeps its memory, too.
        present = storages(tensors)
        self._alive = {name: each for name, each in self._alive.items() if not each.isdisjoint(present)}
        for name in self._alive:
            self.found[name] = replace(self.found[name], last=stage)


@dataclass(frozen=True, slots=True)
class MeasuringOptions:
    """Options for measuring the stages of a chain, and the loss after them.

    `fresh_gradients`: gradients are freed between steps. `stepped`: parameters stepped in the backward. `keepers`:
    storage modes besides the stages' own. `group`: processes that measure the same stages together. `as_node`: runs a
    stage as an autograd node. `cache`: read measurements of earlier processes from disk, and write new ones.
    `closely`: measure times with a small error, for a Pareto front. `progress`: called with the number of finished
    stages, the number of stages, and the next stage's name. `loss_temp_bytes`: temporary bytes to assume for the loss
    if no `loss` is given. `outputs_held`: the caller keeps all outputs through the backward, even if the model returns
    a loss.
    """

    preserve_rng_state: bool = True
    fresh_gradients: bool = False
    stepped: SteppedParameters = NONE_STEPPED
    keepers: Sequence[Keeper] = ()
    group: dist.ProcessGroup | None = None
    as_node: AsNode | None = None
    cache: bool = True
    closely: bool = False
    progress: Progress | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    loss_temp_bytes: int = 0
    outputs_held: bool = False


class StageMeasurer:
    """Measures the stages of a chain on the input `value`. Measures the bytes of only one stage of each signature.

    `silent`: indices of the chain's output tensors that get no gradient.
    """

    def __init__(
        self,
        cut: Cut,
        value: Any,
        device: torch.device,
        options: MeasuringOptions = MeasuringOptions(),
        *,
        silent: tuple[int, ...] = (),
        layer_offers: LayerOffers | None = None,
    ) -> None:
        self.activation_bytes = 0  # bytes of the next stage's input, without carried tensors
        self._device = device
        self._options = options
        self.stepped = options.stepped
        # Addresses of the storages of `value`, which belong to the caller, so that no stage counts them.
        self._owned = list(storages(tensors_in(value)))
        # Maps signatures to the context in which one stage of it was measured, and to its measured bytes.
        self._known: dict[Hashable, tuple[StageContext, StageFindings]] = {}
        # Signatures with new measurements that are not in the cache yet.
        self._unkept: set[Hashable] = set()
        # Maps signatures to the bytes that each storage mode can offload.
        self._offloadable: dict[Hashable, dict[str, int]] = {}
        self._times = StageTimes(closely=options.closely)
        words = tuple(keeper.name for keeper in options.keepers)
        settings = options.fresh_gradients, options.preserve_rng_state, words
        self._cache = measurement_cache(device, *settings) if options.cache and not cut.sharding else None
        self._input, self._prefix = run_prefix(cut, leaves_of(value), device)
        # If the input is a view, such as a microbatch, the rest of the viewed batch counts as fixed.
        self._input_bytes = 0 if cut.input_owned else view_bytes(tensors_in(self._input))
        rng, keepers = options.preserve_rng_state, tuple(options.keepers)
        self._chain = WalkedChain(cut, self._input, device, silent, options.group, rng, keepers, layer_offers)
        self._survey = DiscoveryPass(self._chain, options.stepped)
        self._forget_stages()

    def of(self, cut: Cut) -> StageMeasurer:
        """Return a measurer of the same chain on the same input, with the stages of `cut`, such as compiled ones."""
        other = copy(self)  # shares the dicts that map signatures to measurements
        other._chain = replace(self._chain, cut=cut)
        other._survey = self._survey.of(other._chain)
        other._forget_stages()
        return other

    def walk(self, progress: Progress | None = None) -> Any:
        """Measure all stages; return the chain's output."""
        self._survey.walk(progress)
        self._survey.settle()
        last, value = self._measure(progress)
        # Run again for the output, which was freed, as it might not fit into memory with a graph.
        for number, (_, function) in [*enumerate(self._chain.cut.stages)][last:]:
            with gathered(function, self._chain.cut.sharding):
                value = self._chain.run(self._chain.runner(number), value)
        return value

    def settle_layouts(self, of_output: Layouts) -> None:
        """Measure all stages again if gradients have other layouts than assumed, given those that the loss returns."""
        if self._survey.settle(of_output):
            self._measure()

    def _measure(self, progress: Progress | None = None) -> tuple[int, Any]:
        """Measure and time all stages; return the index of one of the last stages, and its input."""
        self._forget_stages()
        value, stages = self._input, self._chain.cut.stages
        for number, (name, _) in enumerate(stages):
            if progress is not None:
                progress(number, len(stages), name)
            value = self._measure_stage(number, value)
        remember_moved_elsewhere(function for _, function in stages)
        outputs = tensors_in(value)
        counted = [*self._owned, *self._carried.addresses]
        self._held_bytes = storage_bytes([outputs[i] for i in self._chain.silent], counted)
        del value, outputs
        if progress is not None:
            progress(len(stages), len(stages), "again, for their times")
        return self._time()

    def time_again(self) -> float:
        """Time all stages once more; return the sum of their seconds in this pass."""
        self._time_stages({*range(len(self._chain.cut.stages))})
        return sum(self._times.runs_of(kind)[-1].total for kind in self._kinds)

    def _time(self) -> tuple[int, Any]:
        reached = 0, self._input
        while wanted := self._wanted():
            reached = 0, self._input  # free the input of another stage before stages run
            reached = self._time_stages(wanted)
            self._unkept |= {self._kinds[number] for number in wanted}
        while self._unkept:
            kind = self._unkept.pop()
            if self._cache is not None:
                self._cache.keep(kind, self._known[kind][1], self._times.runs_of(kind))
        return reached

    def measurement(self, loss: LossCost) -> Measurement:
        of_kind = {kind: self._costs_of(kind) for kind in set(self._kinds)}
        cut, ways = self._chain.cut, tuple(of_kind[kind][1] for kind in self._kinds)
        stages = tuple(of_kind[kind][0] for kind in self._kinds)
        # An upper bound. A buffer that a forward changes counts twice: a recomputation writes to a copy of its copy.
        snapshots = 2 * bytes_like(tensor for _, function in cut.stages for tensor in moving_buffers(function))
        snapshots += self._decided_bytes + sum(kept_bytes(function) for _, function in cut.stages)
        return Measurement(
            names=tuple(name for name, _ in cut.stages),
            stages=stages,
            gradient_bytes=_gradient_bytes(cut, self.stepped),
            waiting_gradients=self.stepped.waiting(cut) if self.stepped else (),
            summed_gradients=summed if any(summed := self.stepped.summed_up(cut)) else (),
            sum_bytes=_sum_bytes(cut, stages),
            input_bytes=self._input_bytes,
            loss=loss,
            prefix=self._prefix,
            # A recomputation allocates the tensors that the stage's forward leaves in attributes a second time.
            snapshot_bytes=snapshots + sum(each.left_bytes for each in stages),
            carried=tuple(self._carried.found.values()),
            held_bytes=self._held_bytes,
            ways=ways if any(ways) else (),
            unrepeatable=tuple(
                i
                for i, (_, each) in enumerate(cut.stages)
                if not recall_effects(each).reproducible or writes_parameters(each)
            ),
            spread=self._times.spread(self._kinds),
        )

    def _forget_stages(self) -> None:
        self._kinds: list[Hashable] = []
        self._carried = CarriedTensors()
        self._held_bytes = 0
        self._steps = self.stepped.by_stage(self._chain.cut)
        self._decided_bytes = 0  # bytes of the recorded routing decisions of all stages
        self.activation_bytes = self._input_bytes

    def _measure_stage(self, number: int, value: Any) -> Any:
        _, function = self._chain.cut.stages[number]
        carried = offers_of(function).carried
        if number == len(self._chain.cut.stages) - 1:  # no stage passes on what the last one makes: it is its output
            carried = {name: position for name, position in carried.items() if name in self._carried.now}
        with gathered(function, self._chain.cut.sharding):
            beside = self._carried.addresses
            memory, made = self._find(number, value, beside, carried)
            cost = memory.bytes[0]
            self._decided_bytes += memory.decided_bytes
            self.activation_bytes = cost.activation_bytes
            kind, group = self._kinds[-1], self._options.group
            if ELSEWHERE in self._options.keepers and anywhere(kind not in self._offloadable, group, self._device):
                made = None  # free it before a run with a graph
                exact = [way for way in memory.ways if word_of([way]) is None]
                runners = self._stored(number, exact)
                self._offloadable[kind] = offloadable_bytes(["", *exact], runners, value, group, self._device)
            if made is None:  # bytes are known, so the stage has not run above: run it for the next stage's input
                made = self._chain.run(self._chain.runner(number), value)
            value = self._handed_on(number, made)
            self._carried.count_gradients(cost.gradient_storage_bytes)
            self._carried.pass_on(carried, value, number + 1, [*self._owned, *beside])
        return value

    def _wanted(self) -> set[int]:
        wanted = self._times.wanted(self._kinds)
        # A stage may contain collectives, so if one process needs another time of it, all processes time it.
        return {i for i in range(len(self._kinds)) if anywhere(i in wanted, self._options.group, self._device)}

    def _time_stages(self, wanted: set[int]) -> tuple[int, Any]:
        """Time the stages `wanted`; return the index of the last of them, and its input."""
        value, last = self._input, max(wanted)
        with stopwatch(self._device) as watch:
            for number in range(last + 1):
                _, function = self._chain.cut.stages[number]
                with gathered(function, self._chain.cut.sharding):
                    if number in wanted:
                        kind = self._kinds[number]
                        context, memory = self._known[kind]
                        ways = self._stored(number, memory.ways if self._times.all_ways_wanted(kind) else ())
                        run, output = time_ways(
                            ways,
                            value,
                            context,
                            watch,
                            as_node=self._options.as_node,
                            again=self._times.again_wanted(kind),
                            hand_on=number < last,  # keep no output without need, since it may not fit into memory
                        )
                        self._times.add(kind, run, exact=watch.exact)
                    else:
                        graph = recall_effects(function).graph_dependent
                        with isolated(function, self._device), torch.set_grad_enabled(graph):
                            output = self._chain.runner(number).forward(value)
                    if number < last:
                        value = self._handed_on(number, output)
                    del output
        return last, value

    def _handed_on(self, number: int, output: Any) -> Any:
        value = leaves_of(output)
        for tensor, needed in zip(tensors_in(value), self._survey.needs_gradient[number], strict=True):
            tensor.requires_grad_(needed)
        return value

    def _find(
        self, number: int, value: Any, beside: list[int], carried: Mapping[str, int]
    ) -> tuple[StageFindings, Any]:
        """Return the bytes of a stage, and the output of the run that measured them; None if they were known before."""
        _, function = self._chain.cut.stages[number]
        silent = self._chain.silent_of(number)
        apart = tuple(carried.values())
        arriving = self._survey.arriving[number]
        last = number == len(self._chain.cut.stages) - 1
        # The key has the signature, effects, and bytes of the input without carried and owned tensors.
        effects = recall_effects(function)
        found = effects.graph_dependent, effects.without_gradient, effects.reads_statistics
        stepped = self._steps[number]
        places = last, apart, silent, arriving, stepped
        kind = (stage_signature(function, value), named_values(function), self.activation_bytes, found, *places)
        output = None
        if anywhere(kind not in self._known, self._options.group, self._device):
            owned = (*self._owned, *storages(trained_parameters(function)), *beside)
            fresh = self._options.fresh_gradients or any(each is not None for each in stepped)
            context = StageContext(self._device, self.activation_bytes, owned, fresh, *places)
            memory, output = self._weigh(number, value, context, kind)
            # Without `owned`, the addresses of this stage, the context holds for all stages of this signature.
            self._known[kind] = replace(context, owned=()), memory
        self._kinds.append(kind)
        _, memory = self._known[kind]
        remember_moving(function, memory.moving)
        if memory.undecided:  # do not record routing decisions, which may take longer than the stage itself
            remember_undecided(function)
        return memory, output

    def _weigh(self, number: int, value: Any, context: StageContext, kind: Hashable) -> tuple[StageFindings, Any]:
        kept = None if self._cache is None else self._cache.find(kind)
        # Use a measurement from the cache only if this stage still offers all storage modes in it.
        if kept is not None and {*kept[0].ways} <= {*self._chain.runner(number).offered}:
            self._times.add_earlier(kind, kept[1])
            return kept[0], None
        name, function = self._chain.cut.stages[number]
        with During("measuring", name), isolated(function, self._device), torch.enable_grad():
            paying = self._chain.runner(number).paying(leaves_of(value), self._survey.paying(number))
        offered = self._without_doubles(number, value, offered_everywhere(paying, self._options.group, self._device))
        with stopwatch(self._device) as watch:
            # A predicted time (`exact`) would include the memory meter's work, so do not time this run.
            timing = None if watch.exact else watch
            found, run, output = measure_ways(self._stored(number, offered), value, context, timing)
        less = saving_ones(found[0], list(zip(offered, found[1:], strict=True)), self._options.group, self._device)
        names = tuple(name for name, _ in less)
        if run is not None:
            seconds = dict(zip(("", *offered), run.ways, strict=True))
            self._times.add(kind, StageRun(tuple(seconds[name] for name in ("", *names))))
        self._unkept.add(kind)
        ways = (found[0], *(way for _, way in less))
        bytes_decided, moving = decided_bytes(function), recall_moving(function)
        return StageFindings(ways, bytes_decided, moving, names, decides_nothing(function)), output

    def _without_doubles(self, number: int, value: Any, ways: tuple[str, ...]) -> tuple[str, ...]:
        """Of two modes in `ways` that differ by a keeper, drop the one that a trial, cheaper than both, rules out."""
        runners, dropped = dict(zip(ways, self._stored(number, ways)[1:], strict=True)), set[str]()
        for keeper in self._chain.runner(number).suiting:
            for way in [each for each in ways if both(each, keeper.name) in ways]:
                function = runners[way].function
                with isolated(function, self._device), torch.enable_grad():
                    less = keeper.trial(runners[way].forward, function, leaves_of(value)).clearly_less
                if less is not None:
                    fewer = anywhere(less, self._options.group, self._device)
                    dropped.add(way if fewer else both(way, keeper.name))
        return tuple(way for way in ways if way not in dropped)

    def _stored(self, number: int, ways: Sequence[str]) -> list[StageRunner]:
        runner = self._chain.runner(number, ways)
        return [runner.by(option) for option in range(1 + len(ways))]

    def _costs_of(self, kind: Hashable) -> tuple[StageCost, tuple[Way, ...]]:
        _, memory = self._known[kind]
        whole, *others = map(StageCost.of, memory.bytes, self._times.of(kind))
        ways = worth_choosing(whole, list(map(Way, memory.ways, others)))
        return whole, (*ways, *with_offloading((Way("", whole), *ways), self._offloadable.get(kind, {})))


def _gradient_bytes(cut: Cut, stepped: SteppedParameters) -> tuple[int, ...]:
    # For each stage, the bytes of gradients that its backward allocates: of a shared parameter, the last stage's does.
    seen: set[int] = set()  # ids of parameters, since `==` of tensors is elementwise
    result = []  # from the last stage on, in backward order
    for _, function in reversed(cut.stages):
        new = [parameter for parameter in trained_parameters(function) if id(parameter) not in seen]
        seen.update(map(id, new))
        result.append(bytes_like(stepped.others(new)))
    return tuple(result[::-1])


def _sum_bytes(cut: Cut, stages: Sequence[StageCost]) -> tuple[int, ...]:
    # Autograd sums gradients of a shared parameter in place, but allocates the first sum if the first one is a view.
    views: dict[int, bool] = {}
    result = [0] * len(stages)
    for number, (_, function) in reversed([*enumerate(cut.stages)]):
        for i, parameter in enumerate(trained_parameters(function)):
            if views.get(id(parameter)):
                result[number] = max(result[number], bytes_like([parameter]))  # one parameter after the other
            views[id(parameter)] = id(parameter) not in views and i in stages[number].view_gradients
    return tuple(result) if any(result) else ()


class MeasuredCut(NamedTuple):
    """The stages of a model, such as compiled ones, and their measured seconds and bytes."""

    cut: Cut
    measurement: Measurement


def measure(
    cut: Cut, value: Any, device: torch.device, options: MeasuringOptions, layer_offers: LayerOffers | None = None
) -> Measurement:
    """Return the seconds and bytes of all stages of `cut` on the input `value`, and of the loss.

    Raises UnusableLossError if the loss is no scalar that requires a gradient, and ValueError for a device type whose
    memory cannot be measured. Errors of a stage pass through, with a note that names the stage.
    """
    stages = StageMeasurer(cut, value, device, options, layer_offers=layer_offers)
    output = stages.walk(options.progress)
    cost = unmeasured_loss(device, options.loss_temp_bytes)
    layouts: Layouts = ()
    if options.loss is not None:
        cost = measure_loss(options.loss, output, device=device, output_bytes=stages.activation_bytes)
        layouts = loss_layouts(options.loss, output, device)
    del output
    stages.settle_layouts(layouts)
    return stages.measurement(cost)


def unmeasured_loss(device: torch.device, temp_bytes: int) -> LossCost:
    """Return the assumed cost of an unknown loss, which keeps two scalars: its value, and the gradient of its value."""
    return LossCost(0.0, temp_bytes, 2 * allocated(8, device.type))  # a scalar has at most eight bytes
