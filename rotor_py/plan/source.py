"""Get stages from a model, measure them and run them by sequences: a chain's layers, or parts of captured graphs."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Container, Hashable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rotor_profiling import isolated, tensors_in
from rotor_profiling.attributes import attributes_kept
from rotor_profiling.backends import operators
from rotor_profiling.contents import with_own_containers
from rotor_profiling.storage import layout_of
from rotor_profiling.torch_compat import FakeTensor, is_fsdp_module
from rotor_py.compile.compiled_stage import StageCompiler
from rotor_py.compile.stage_code import Config
from rotor_py.distributed.sharding import as_entered, gathers_in_another_dtype, is_sharded
from rotor_py.errors import InvalidStateError, UnsupportedModelError, record_fields
from rotor_py.execute import regions
from rotor_py.execute.instructions import Instructions, Runners, read_sequence
from rotor_py.execute.joined_stages import joined_where_possible
from rotor_py.execute.oom_retry_tape import OOMRetryTape, SmallerPlans
from rotor_py.execute.tape import Tape
from rotor_py.measure.cut import Cut, Layer, cut, is_chain, layers
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stage_measurer import MeasuredCut, MeasuringOptions, measure
from rotor_py.offload.offload_saved import Tier
from rotor_py.plan.saved_plan import Plan
from rotor_py.plan.step_spec import TensorSpec, describe, reaches, spec_of, specs_agree
from rotor_py.stage.error_context import stage_of, watchers
from rotor_py.stage.first_run import counters_aside
from rotor_py.stage.forward_state import made_dropped
from rotor_py.stage.protocol import Keeper, StageOffers, calls_forward_alone, own_of
from rotor_py.stage.runner import StageRunner
from rotor_solver import Chain, Sequence

if TYPE_CHECKING:
    from rotor_py.capture.captured_layer import CapturedLayer
    from rotor_py.capture.variants import CompileBudget

_log = logging.getLogger("rotor_py")

_MOST_READ = 8  # Number of translated sequences to cache. A guess: each forward in flight may follow another one.


@dataclass(frozen=True, slots=True)
class Following:
    """How to run a forward: by `sequence`, in the storage modes of `measurement`, offloading to `tier`.

    `smaller` makes plans after an out-of-memory error. `changed` gets the names of stages that later plans must store.
    """

    sequence: Sequence
    preserve_rng_state: bool
    measurement: Measurement
    keepers: tuple[Keeper, ...] = ()
    smaller: SmallerPlans | None = None
    tier: Tier | None = None
    changed: set[str] | None = None
    chain: Chain | None = None  # the stages' costs; None to join no stages
    goes_on: bool = False  # whether to run a captured graph other than the planned one without a plan; else raise


class SequenceExecutor:
    """Runs the stages of `model` in the order of a sequence. Caches the last ones as `Instructions` with runners."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # cache, latest last: key, instructions, runners, and whether `fully_shard` was applied to the model
        self._read: list[tuple[tuple[object, ...], Instructions, Runners, bool]] = []

    def execute(
        self,
        stages: Items[Layer],
        make: Callable[[], Runners],
        value: Any,
        how: Following,
        context: tuple[Any, ...] = (),
    ) -> Any:
        """Run `stages` on `value` so that their backward follows `how.sequence`. `make` returns their runners."""
        # Compare objects by identity: comparing thousands of operations would take longer than a small stage takes.
        costs = None if how.smaller or how.sequence.moves or watchers else how.chain  # None: each stage by itself
        key = how.sequence, stages, how.measurement, how.preserve_rng_state, costs
        read = next((each for each in self._read if all(map(operator.is_, each[0], key))), None)
        if read is None:
            instructions, runners, sharded = read_sequence(len(stages), how.sequence), make(), is_sharded(self._model)
            if not sharded:  # with sharding, `regions.run` sets the options of stored stages
                runners = runners.by(instructions.options)
                if costs is not None:
                    runners, sequence = joined_where_possible(runners, how.sequence, costs)
                    instructions = read_sequence(len(runners), sequence)
            read = key, instructions, runners, sharded
            self._read = [*self._read[1 - _MOST_READ :], read]
        _, instructions, runners, sharded = read
        with operators():
            if sharded:
                # FSDP's hooks on modules and tensors must be called in an order that only autograd's own nodes keep.
                return regions.run(runners, regions.regions(how.sequence), value, instructions.options, context)
            if how.smaller is not None:
                return OOMRetryTape(runners, instructions, how.smaller, context).forward(value)
            return Tape(runners, instructions, tier=how.tier, context=context, changed=how.changed).forward(value)

    def execute_graph(self, how: Following, cut: Cut, value: Any) -> Any:
        """Run the stages of a captured graph on `value`. `cut` has the stages for the shapes of `value`."""
        from rotor_py.capture.captured_graph import runners_of, shared_apart

        for _, layer in cut.prefix:
            value = layer(value)
        value, context = shared_apart(cut.stages, value)
        return self.execute(
            cut.stages,
            lambda: runners_of(cut.stages, how.preserve_rng_state, how.measurement.way_names, how.keepers),
            value,
            how,
            context,
        )


_LEAST_BYTES = 2**20  # Layers that save fewer bytes are not captured for storage in part. A guess: that takes seconds.
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_OPERATORS = "torch.nn."  # package of layers that run a single operator if they contain no layers


class LayerParts:
    """Finds storage modes in which a layer of one model stores only part of its saved tensors.

    Of layers that compute the same, captures one, if it saves enough bytes. `sharded`: whether FSDP shards the model.
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self._sharded = sharded
        self._found: dict[int, CapturedLayer] = {}  # maps ids of layers to their modes; the values hold the layers
        self._kinds: dict[Hashable, CapturedLayer | None] = {}  # the first layer of each kind; None: no partial storage

    def look_at(
        self, function: nn.Module, name: str, kind: Hashable, value: Any, device: torch.device, saved_bytes: int
    ) -> None:
        """Find the modes that store the layer `function` in part, on the input `value`; once for each `kind` of layer.

        Autograd saves `saved_bytes` for the layer's backward, without its parameters, input and output.
        """
        self._found.pop(id(function), None)
        if kind not in self._kinds:
            self._kinds[kind] = None
            if saved_bytes >= _LEAST_BYTES and _may_gain(function, value):
                from rotor_py.capture.captured_layer import CapturedLayer  # late: it imports TorchDynamo

                layer = CapturedLayer(function, name, sharded=self._sharded)
                self._kinds[kind] = layer if layer.find(value, device) else None
        first = self._kinds[kind]
        if first is not None:
            self._found[id(function)] = first if first.layer is function else first.of_kind(function, name)

    def of(self, function: nn.Module) -> StageOffers | None:
        """Return a layer's offers of partial storage; None if `look_at` has found none."""
        return self._found.get(id(function))

    def planned(self, function: nn.Module, name: str, ways: Items[str], keepers: Container[str]) -> StageOffers | None:
        """Return a layer's offers for the storage modes `ways` of a plan, some of which are combined with `keepers`."""
        own = dict.fromkeys(each for each in (own_of(way, keepers) for way in ways) if each is not None)
        if own and id(function) not in self._found:  # not measured: the plan is from a file, or the model is a copy
            from rotor_py.capture.captured_layer import CapturedLayer

            self._found[id(function)] = CapturedLayer(function, name, tuple(own), sharded=self._sharded)
        return self.of(function)


def _may_gain(function: nn.Module, value: Any) -> bool:
    """Whether a layer can be captured, and may run several operators, so that part of their results can be stored."""
    operator = type(function).__module__.startswith(_OPERATORS) and not function._modules
    tensors = [*function.parameters(), *function.buffers(), *tensors_in(value)]
    plain = all(type(each) in _PLAIN and layout_of(each) is None for each in tensors)
    # Recognize FSDP modules by their class: their hooks are removed while layers are measured.
    gathered_inside = any(is_fsdp_module(each) for each in function.modules() if each is not function)
    return not operator and plain and not gathered_inside and calls_forward_alone(function)


class LayerSource(SequenceExecutor):
    """The layers of an `nn.Sequential`, nested ones included, as stages. A plan does not serve larger batches."""

    captured = False
    answers = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._parts = LayerParts(sharded=is_sharded(model))

    def renewed(self) -> LayerSource:
        """Return a new source for the same model, without measured stages, for another kind of step."""
        return LayerSource(self._model)

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the only argument of a forward, the first layer's input. Raises TypeError for other arguments."""
        if len(arguments) == 1 and not keywords:
            return arguments[0]
        (value,) = inspect.signature(self._model.forward).bind(*arguments, **keywords).arguments.values()
        return value

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether `value` differs from the spec `planned` at most by fewer samples; others may need more memory."""
        return specs_agree(planned, spec_of(value), TensorSpec.covers)

    def measure(
        self, value: Any, device: torch.device, options: MeasuringOptions, room: Any
    ) -> tuple[list[MeasuredCut], Any]:
        """Cut the model into layers and measure them on `value`; `room` is unused (see `GraphSource`).

        Returns the only variant, and `value`. Raises UnsupportedModelError if the model cannot be cut.
        """
        parts = LayerParts(sharded=is_sharded(self._model))
        try:
            with (
                operators(),
                attributes_kept(self._model, caches=False),
                counters_aside(),
                made_dropped(self._model),
            ):
                found = cut(self._model, value, device)
                measurement = measure(found, value, device, options, parts)
        except InvalidStateError as error:
            if error.kind != "attribute_changed":
                raise
            return self.measure(value, device, options, room)  # the attribute's tensor is copied now, and restored
        except (LookupError, AttributeError, TypeError) as error:  # an empty list, a missing key or attribute, None
            if (name := stage_of(error)) is None or not self._runs_whole(value, device):
                raise
            text = f"return what layer {name!r} needs from the layers before, as it fails without them, or wrap the "
            text += "model in an nn.Module whose forward calls the layers, so that it is captured"
            raise UnsupportedModelError(text, kind="hidden_input", name=name) from error
        # Replace these only after measuring: if that raises, the earlier plan, which reads them, stays in use.
        self._parts, self._read = parts, []
        return [MeasuredCut(found, measurement)], value

    def _runs_whole(self, value: Any, device: torch.device) -> bool:
        with suppress(Exception), isolated(self._model, device), torch.no_grad():
            self._model.forward(with_own_containers(value))
            return True
        return False

    def follow(self, cut: Cut) -> None:
        """Do nothing: a chain of layers has a single variant of its stages, which `run` gets as `cut`."""

    def same_graph(self, other: Source) -> bool:
        """Return True: the stages of two sources of one chain are its layers, and differ at most in sizes."""
        return True

    def adopt(self, plan: Plan) -> Cut:
        """Return the stages of a plan from a file. Raises PlanMismatchError if the plan was made for other layers."""
        return plan.cut(layers(self._model))

    def run(self, cut: Cut | None, value: Any, how: Following) -> Any:
        """Run the model forward on `value`, so that its backward follows `how.sequence`."""
        assert cut is not None
        for _, layer in cut.prefix:
            value = layer(value)
        return self.execute(cut.stages, partial(self._runners, cut, how), value, how)

    def _runners(self, cut: Cut, how: Following) -> Runners:
        kept = [keeper.name for keeper in how.keepers]
        return Runners(
            StageRunner(
                function,
                name,
                how.preserve_rng_state,
                ways=ways,
                keepers=how.keepers,
                offers=self._parts.planned(function, name, ways, kept),
            )
            for (name, function), ways in zip(cut.stages, how.measurement.way_names, strict=True)
        )


class GraphSource(SequenceExecutor):
    """The stages of a model's graph, which TorchDynamo captures. Inputs are pairs (arguments, keyword arguments)."""

    captured = True

    def __init__(self, model: nn.Module, granularity: int, compiler: StageCompiler | None = None) -> None:
        # Import late: this imports TorchDynamo, which takes as long as the rest of torch.
        from rotor_py.capture.session import CaptureSession

        super().__init__(model)
        self._granularity, self._compiler = granularity, compiler
        self._session = CaptureSession(model, granularity)

    @property
    def answers(self) -> tuple[bool, ...] | None:
        """Results of the model's conditions on the measured batch, such as whether it has padding; None if unknown."""
        return self._session.answers

    def renewed(self) -> GraphSource:
        return GraphSource(self._model, self._granularity, self._compiler)

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        given = arguments, keywords
        return as_entered(self._model, given) if dist.is_initialized() else given

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether no dimension of a tensor in `value` is larger than in `planned`. `run` refuses other graphs."""
        return reaches(planned, value)

    def measure(
        self,
        value: Any,
        device: torch.device,
        options: MeasuringOptions,
        room: Callable[[Measurement, Any], CompileBudget] | None,
    ) -> tuple[list[MeasuredCut], Any]:
        """Capture the model and measure its stages on `value`. Raises UnsupportedModelError if it cannot be cut.

        Returns the measured variants of the main graph's stages: first those with compiled stages, last the uncompiled
        one, which runs until `follow` sets another. Also returns all values that the caller holds during the step:
        arguments, keyword arguments, and values that all stages share. `room` maps the uncompiled step's measurement
        and these values to the budget for a graph compiled as one stage.
        """
        arguments, keywords = value
        within = room and (lambda plain, shared: room(plain, (arguments, keywords, shared)))
        ways, shared = self._session.measure(arguments, keywords, device, options, compiler=self._compiler, room=within)
        return ways, (arguments, keywords, shared)

    def follow(self, cut: Cut) -> None:
        self._session.follow(cut)

    def same_graph(self, other: Source) -> bool:
        return isinstance(other, GraphSource) and self._session.same_graph(other._session)

    def adopt(self, plan: Plan) -> None:
        """Have the graph cut as in a plan from a file, when the first step captures it."""
        self._session.cut_layers = partial(_cut_as_saved, plan, self._compiler)
        self._session.answers = tuple(plan.answers)

    def run(self, cut: Cut | None, value: Any, how: Following) -> Any:
        """Run the model. PlanMismatchError if its graph is not the planned one; OtherDataError if data cause that."""
        arguments, keywords = value

        def told() -> None:
            text = "TorchDynamo captures another graph of the model: the input is %s; TORCH_LOGS=recompiles shows the "
            text += "reason"
            _log.warning(text, describe(spec_of(value)), extra=record_fields("captured_again"))

        # Dynamo calls `execute_graph` during the forward.
        by_plan = partial(self.execute_graph, how)
        return self._session.run(arguments, keywords, by_plan, told, goes_on=how.goes_on)


def _cut_as_saved(plan: Plan, compiler: StageCompiler | None, named: list[Layer]) -> Cut:
    found = plan.cut(named)
    if plan.compiled is None:
        return found
    assert compiler is not None  # set by `Planner.adopt`
    return plan.compiled.compiled_again(found, compiler, plan.costs.budget.chain, plan.costs.measurement.way_names)


Source = LayerSource | GraphSource


def source_of(model: nn.Module, granularity: int, compile: Config | None = None) -> Source:
    """Return a `LayerSource` for a chain, which needs no capture, and a `GraphSource` for any other model.

    A chain is captured, too, if it is compiled (`compile`: options of Inductor), since compiled layers would lose side
    effects; or if `fully_shard` gathers it in another dtype: FSDP's hooks, not called in measuring, cast its inputs.
    """
    if compile is not None:
        return GraphSource(model, granularity, StageCompiler(compile))
    if is_chain(model) and not gathers_in_another_dtype(model):
        return LayerSource(model)
    return GraphSource(model, granularity)
