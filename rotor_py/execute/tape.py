"""Run the forward and the backward of a model in the order of a sequence, inside autograd.

# Note [Replaying a sequence inside autograd]
#
# Each stage adds its own nodes to the caller's graph, and autograd's engine calls these in the backward.
#
#  1. A stage whose first forward is `Fe` runs as in plain training: its own operators are in the caller's graph, and
#     the engine runs its backward.
#  2. Every other stage is one node of the graph (see `StageNode`), with the stage's parameters among its inputs. So the
#     engine knows every parameter: it calls their hooks, `autograd.grad` finds them, and DistributedDataParallel sends
#     a bucket as soon as its gradients are made.
#  3. All nodes of one forward share a tape. A node's backward makes the tape run the operations up to and including the
#     `B` of its stage.
#  4. The first run of a stage may change buffers and the random state. Before it, the tape records the forward state:
#     buffers, random state and autocast. A recompute starts from this state, and undoes its own changes. The plan's
#     runners hold no state, since they also serve other forwards in flight.
#  5. The tape keeps inputs detached. It holds no reference to the caller's graph, which refers to the tape: so there
#     are no cycles, and if the caller drops the output, everything is freed.
#  6. The tape releases an input as soon as no later operation reads it.
#  7. The inner graph of a recomputed stage ends at aliases of the parameters, and at a node that holds no tensor (see
#     `StageRunner.attach`). So an input that the backward does not need is freed, as in plain training.
#  8. The number of its graph task identifies a backward pass. A pass that retains the graph works on a copy of the
#     tape's values, so that another can follow. Any other pass consumes the nodes that it goes through, and leaves only
#     values that other nodes need: usually none. A second pass through a consumed node raises an error (see `Passes`).
#  9. Forwards right before the backward of a stage of rule 1 run from a hook on that stage's output, when its gradient
#     arrives. Only sequences by hand have such forwards.
# 10. If a forward or a backward pass raises an error, the tape releases the values of this pass at once, which the
#     error's traceback would keep. Values held for a retained graph stay for the next pass, as in plain training.
# 11. In a zero-bubble pipeline, a first backward asks for gradients of inputs only, and a second one for gradients of
#     parameters. The first computes both, and keeps the parameter gradients (see `Unclaimed`).
# 12. A recompute right before the backward of its stage only allocates the stage's output, which nothing reads, and
#     does not compute it (see `stage.skipped_output`).
# 13. An `OOMRetryTape` recomputes after an out-of-memory error. It makes every stage a node (see its own Note).
# 14. If a collective is pending for a gradient (tensor parallelism), the tape waits for it before it recomputes stages:
#     the collective keeps its tensors in memory until then. `StageRunner` waits for outputs at the end of a stage.
# 15. Saved tensors of stages of rule 1 may be offloaded and fetched. The tape waits for copies out, and begins copies
#     back, right before the operations that the plan names, even if the engine runs these operations (`Moving`).
# 16. Consecutive stages of rule 1 run as one function, if they can and nothing is offloaded in between. This function
#     gets its input in a list, which it empties: tensors in other arguments would exist until it returns.
# 17. A node that returns a tensor of its input returns a copy, so that gradients add up in plain training's order. If
#     the caller gets this copy, its gradient lacks what stages add that read the tensor. So a hook refuses to show it.
# 18. Captured stages that are always recomputed together are one node, if that takes no more memory: see
#     `joined_stages.py`. The tape then gets their joined runner, and a sequence with one operation in place of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Operations
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch

from rotor_profiling import leaves_of
from rotor_profiling.isolate import trained_parameters, undoing
from rotor_profiling.storage import tensors_in, wait_for
from rotor_profiling.torch_compat import TreeSpec
from rotor_profiling.value_tree import Structure, tree_flatten, tree_unflatten
from rotor_py.errors import InvalidStateError, InvalidValueError, StageChangedError
from rotor_py.execute.backward_passes import (
    ActivationStore,
    Held,
    Pass,
    Passes,
    Unclaimed,
    goes_through,
    goes_through_any,
    retains_graph,
)
from rotor_py.execute.instructions import Instructions, Runners, Step, read_sequence
from rotor_py.offload.offload_saved import OffloadableStorages, Tier
from rotor_py.stage.error_context import watchers
from rotor_py.stage.first_run import described, mark_of
from rotor_py.stage.forward_state import Surroundings, recall_effects
from rotor_py.stage.replayed_routing import draws
from rotor_py.stage.runner import AttachedStage, Left, StageRunner, run_offloadable
from rotor_py.stage.saved_tensors import hook_gradients
from rotor_solver import Backward, ForwardEnable, Sequence
from rotor_solver.offload import Moves


@dataclass(slots=True)
class Moving:
    """Offloads the saved tensors of one forward to `tier`, and fetches them for its backward.

    Waits and fetches are done once, in the order of the sequence; `position` is the index of the next operation. If the
    backward has another order, a tensor that has not been fetched is fetched when it is read.
    """

    moves: Moves
    tier: Tier
    position: int = 0
    _away: dict[int, OffloadableStorages] = field(default_factory=dict)

    def come_to(self, position: int) -> None:
        """Do the waits and fetches planned up to operation `position`. Raises OffloadError if a copy out failed."""
        while self.position <= position:
            for stage in filter(self._away.__contains__, self.moves.wait_out[self.position]):
                self._away[stage].wait_out()
            for stage in filter(self._away.__contains__, self.moves.fetch[self.position]):
                self._away[stage].fetch()
            # Advance last, so that the next call repeats the wait, and raises the error of a failed copy again.
            self.position += 1

    def forward(self, runner: StageRunner, stage: int, value: Any, context: tuple[Any, ...]) -> Any:
        if stage not in self.moves.stages:
            return runner.forward(value, context)
        output, offloadable = run_offloadable(runner, value, context)
        offloadable.offload(self.tier)
        self._away[stage] = offloadable
        return output


_TENSOR = object()  # stands for a tensor in `Frame.leaves`, where None may be a value


@dataclass(frozen=True, slots=True)
class Frame:
    """A nested value without its tensors: autograd tracks only those that a node takes and returns one by one."""

    spec: TreeSpec | Structure
    leaves: tuple[Any, ...]
    tensors: int  # number of leaves that are tensors

    @classmethod
    def of(cls, value: Any) -> tuple[Frame, list[torch.Tensor]]:
        flat, spec = tree_flatten(value)
        leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        return cls(spec, leaves, len(tensors)), tensors

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


def _copied_by(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stages whose nodes got a tensor from an earlier stage and returned a copy (Rule 17)."""
    known: dict[int, tuple[int, ...]] = getattr(tensor.grad_fn, "copied_by", {})
    return known.get(tensor.output_nr, ())


def _is_users(hook: Any) -> bool:
    return not (getattr(getattr(hook, "func", hook), "__module__", "") or "").startswith(("rotor_", "torch."))


class StageNode(torch.autograd.Function):
    """One stage as a node: runs without a graph in the forward; in the backward, the tape recomputes it (Rule 2)."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, stage: int, frame: Frame, *tensors: torch.Tensor) -> Any:
        ctx.tape, ctx.stage, ctx.input_tensors, ctx.unclaimed = tape, stage, frame.tensors, None
        tape.passes.nodes[stage] = ctx
        ctx.set_materialize_grads(False)  # missing gradients stay None, as in plain training
        left: list[torch.Tensor] = []
        inputs = tensors[: frame.tensors]
        # Leaves of its own: of a hook that the stage registers on its input, only the recomputation's must be called.
        given = [leaves_of(tensor) for tensor in inputs]
        output, without_gradient = tape.run_first(stage, frame.filled(given), left)
        ctx.mark_non_differentiable(*without_gradient)
        tape.frames[stage], made = Frame.of(output)
        at = {id(tensor): number for number, tensor in enumerate(given)}
        passed = [(number, at[id(tensor)]) for number, tensor in enumerate(made) if id(tensor) in at]
        ctx.copied_by = {number: (*_copied_by(inputs[position]), stage) for number, position in passed}
        # A loss may read these in attributes, where they get the node's history: autograd returns the same objects.
        return *made, *left

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Return the gradients of a stage's input and parameters; compute those of parameters only once (Rule 11)."""
        # In a backward, grad mode is on only with create_graph=True. The caller's graph does not contain that of a
        # recomputed stage, so second derivatives would be silently wrong.
        if torch.is_grad_enabled():
            name = ctx.tape.runners[ctx.stage].name
            nodes = ctx.tape.passes.nodes.items()
            ctx.tape._note_changed(stage for stage, node in nodes if goes_through(node))
            remedy = f"{ctx.tape.why_a_node}, or train this loss without Checkpointable"
            text = f"create_graph=True cannot go through stage {name!r}, {remedy}"
            raise InvalidStateError(text, kind="create_graph", stage=ctx.stage, name=name)
        sources = [node for node, _ in ctx.next_functions]
        if all(gradient is None for gradient in gradients):
            return None, None, None, *[None] * len(sources)
        inputs: int = ctx.input_tensors
        if ctx.unclaimed is not None:
            kept = ctx.unclaimed.take(gradients, leave=retains_graph())
            if kept is not None and not goes_through_any(sources[:inputs]):
                return None, None, None, *[None] * inputs, *kept
        found = ctx.tape.backward(ctx.stage, gradients)
        if len(sources) > inputs and retains_graph() and not goes_through_any(sources[inputs:]):
            ctx.unclaimed = ctx.unclaimed or Unclaimed()
            ctx.unclaimed.keep(gradients, found[inputs:])
        return None, None, None, *found


class CheckpointOptim(StageNode):
    """The autograd function that replays a sequence. Each stage whose first forward is not `Fe` is one node."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run a chain forward so that its backward follows a sequence.

        `apply(functions, sequence, names, preserve_rng_state, arg)`: `functions` are the stages (modules, or callables
        without parameters), each called with the output of the one before, the first with `arg`; `sequence` is a
        `Sequence` or its text; errors contain `names`, one for each stage. Recomputed stages draw the same random
        numbers as in the forward if `preserve_rng_state` is True. Returns the output of the last stage.

        Raises ValueError if the sequence is not valid for as many stages, or if names and functions differ in number;
        RuntimeError if a stage to recompute overwrites its own input.
        """
        functions, sequence, names, preserve_rng_state, arg = args
        named = zip(functions, names, strict=True)
        runners = [StageRunner(function, name, preserve_rng_state) for function, name in named]
        found = Sequence.parse(sequence) if isinstance(sequence, str) else sequence
        return Tape(runners, read_sequence(len(runners), found)).forward(arg)


class Tape:
    """The state shared by the nodes of one forward. It keeps stage inputs in `store`, and offloads to `tier`. `Runners`
    must have the storage options of `instructions`.

    The tape adds to `changed` the names of stages that later plans have to store: values that they read have changed,
    or a backward with create_graph=True goes through them.
    """

    why_a_node = "which is recomputed in the backward; plans of later steps store it if the limit has room"
    """Part of the error about create_graph=True: why the stage is a node, and how to avoid that."""

    def __init__(
        self,
        runners: Operations[StageRunner] | Runners,
        instructions: Instructions,
        store: ActivationStore | None = None,
        tier: Tier | None = None,
        context: tuple[Any, ...] = (),
        changed: set[str] | None = None,
    ) -> None:
        self.context = context
        self._changed = set() if changed is None else changed
        self._shared = tensors_in(context)
        # Set storage options before the first run: in some stages, they change forwards without a graph, too.
        self.runners = runners if isinstance(runners, Runners) else Runners(runners).by(instructions.options)
        self.instructions = instructions
        self.surroundings: dict[int, Surroundings] = {}
        self.needs_gradient: dict[int, list[bool]] = {}
        self._kept: dict[int, list[Any]] = {}  # maps stages to `mark_of` each of their input's tensors when it was kept
        self.frames: dict[int, Frame] = {}  # maps stages to frames of their outputs: a node can return only tensors
        self.passes = Passes(Held(ActivationStore() if store is None else store), instructions)
        self._moving: Moving | None = None
        if instructions.moves is not None:
            if tier is None:
                text = "give offload=: the sequence offloads saved tensors, and there is no tier for them"
                raise InvalidValueError(text, kind="no_tier", name="offload")
            self._moving = Moving(instructions.moves, tier)

    def forward(self, value: Any) -> Any:
        """Run the operations before the loss on the chain's input `value`; return its output, in the caller's graph."""
        held = self.passes.left
        assert held is not None
        # Stages keep aliases of the inputs, which do not show that the user has replaced a trained one's `data`.
        trained = [tensor for tensor in tensors_in(value) if tensor.is_leaf and tensor.requires_grad]
        self._shared = [*tensors_in(self.context), *trained]
        try:
            output = self._forward(held, value)
        except BaseException:  # Rule 10
            held.clear()
            raise
        for tensor in {id(tensor): tensor for tensor in tensors_in(output)}.values():
            if stages := _copied_by(tensor):
                tensor.register_hook(partial(self._refuse_to_show_part, ref(tensor), stages))
        return output

    def _refuse_to_show_part(self, known: ref[torch.Tensor], stages: tuple[int, ...], part: Any) -> None:
        """Raise InvalidStateError if the user asks for an output's gradient, of which this is a `part` (Rule 17)."""
        tensor = known()
        hooked = tensor is not None and (
            tensor.retains_grad or any(map(_is_users, (tensor._backward_hooks or {}).values()))
        )
        node = self.passes.nodes.get(stages[-1])  # None once an `OOMRetryTape` has begun anew
        ends_here = part is not None and node is not None and not goes_through_any(n for n, _ in node.next_functions)
        if hooked or ends_here:
            names = [self.runners[stage].name for stage in stages]
            self._note_changed(stages)
            text = (
                f"run the step once more to see this output's gradient: it passes stage {names[0]!r}, {self.why_a_node}"
            )
            raise InvalidStateError(text, kind="part_of_gradient", name=names[0])

    def _forward(self, held: Held, value: Any) -> Any:
        moving = self._moving
        frontier = 0  # the first stage that has not run
        position = 0
        for steps in self.instructions.pieces:
            stop = frontier + len(steps)
            run = self.runners.joined(frontier, stop) if len(steps) > 1 and not watchers else None
            if run is not None:  # Rule 16: several stages as one function
                values = list(value)
                del value
                value = run(values, self.context)
                frontier, position = stop, position + len(steps)
                continue
            for step in steps:
                if moving is not None:  # Rule 15
                    moving.come_to(position)
                position += 1
                if step.operation.stage < frontier:  # type: ignore[union-attr] # no loss here
                    self._recompute(held, step)
                else:
                    value = self._run_next(held, step, frontier, value)
                    frontier += 1
        if moving is not None:
            moving.come_to(position)
        return value

    def _run_next(self, held: Held, step: Step, stage: int, value: Any) -> Any:
        recomputed = stage in self.instructions.recomputed
        if recomputed:
            self.needs_gradient[stage] = [tensor.requires_grad for tensor in tensors_in(value)]
        if stage in step.live:  # Rule 5: keep the input, detached
            self._keep(held, stage, value)
        if stage not in self.instructions.in_graph:
            value = self._add_node(stage, value)  # Rule 2: the stage as one node
        elif recomputed:
            # The stage must not overwrite an input that the tape keeps. It may overwrite any other input.
            value = self._first(self._runner(step), stage, value, held.inputs[stage] if stage in step.live else None)
        elif self._moving is None:
            value = self._runner(step).forward(value, self.context)  # Rule 1: plain autograd
        else:
            value = self._moving.forward(self._runner(step), stage, value, self.context)
        if stage in self.instructions.awaited:  # Rule 9
            hook_gradients(value, partial(self._arrived, stage))  # only the first call finds operations to run
        held.inputs.drop_all_but(step.live)
        return value

    def _add_node(self, stage: int, value: Any) -> Any:
        frame, tensors = Frame.of(value)
        made = StageNode.apply(self, stage, frame, *tensors, *trained_parameters(self.runners[stage].function))  # type: ignore[no-untyped-call]  # torch's
        return self.frames.pop(stage).filled(made)

    def run_first(self, stage: int, value: Any, left: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """Run a stage inside its node, and record the forward state, so that it can be recomputed (Rule 4).

        Returns its output, without a graph, and the output tensors that have no gradient in plain training. Otherwise,
        autograd gives every floating-point output of a node a gradient if any of its inputs has one.
        """
        runner = self.runners[stage]
        output = self._first(runner, stage, value, value, left)
        return output, self._without_gradient(runner, value, output)

    def _first(self, runner: StageRunner, stage: int, value: Any, kept: Any, left: Left = None) -> Any:
        before = self._versions(kept)
        output, self.surroundings[stage] = runner.first(value, self.context, left)
        self._refuse_overwritten(stage, kept, before)
        return output

    def backward(self, stage: int, gradients: Operations[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run the operations through `B` of `stage` (Rule 3). Return gradients of its input, then its parameters."""
        wait_for(gradients)  # Rule 14: before stages are recomputed
        with undoing(), self.passes.resume(stage) as current:  # `undoing` restores state after an interrupted recompute
            self._advance(current, stage)
            attached = current.held.attached.pop(stage)
            current.held.inputs.drop_all_but(self.instructions.replay[self.instructions.backward_at[stage]].live)
            found = attached.backward(gradients, retain_graph=current.retain_graph)
            if self.passes.left is None and stage not in self.instructions.runs_after_backward:
                self.surroundings.pop(stage, None)  # release it now: the tape exists as long as the caller's output
            return found

    def _arrived(self, stage: int, gradient: torch.Tensor) -> None:
        """Run the operations before `B` of an `awaited` stage, when a gradient arrives at its output (Rule 9)."""
        if not goes_through_any(self.passes.nodes.values()):
            if self._moving is not None:
                self._moving.come_to(len(self.instructions.forward) + 1 + self.instructions.backward_at[stage])
            return  # this pass goes through no node of the tape, so nothing is recomputed
        wait_for(gradient)  # Rule 14: before stages are recomputed
        with self.passes.resume(stage) as current:
            self._advance(current, stage)

    def _advance(self, current: Pass, stage: int) -> None:
        moving, loss = self._moving, len(self.instructions.forward)
        begin, end = current.position, self.instructions.backward_at[stage]
        for position, step in enumerate(self.instructions.replay[begin:end], begin):
            if moving is not None:  # Rule 15
                moving.come_to(loss + 1 + position)
            if isinstance(step.operation, Backward):
                # The engine has run this backward itself, or no gradient has reached the stage: drop its graph.
                current.held.attached.pop(step.operation.stage, None)
                current.held.inputs.drop_all_but(step.live)
            else:
                self._recompute(current.held, step)
        if moving is not None:
            moving.come_to(loss + 1 + end)
        current.position = max(begin, end)

    def _recompute(self, held: Held, step: Step) -> None:
        stage = step.operation.stage  # type: ignore[union-attr] # a forward
        value, surroundings = held.inputs[stage], self.surroundings[stage]  # Rule 4: as in the first run
        try:
            self._refuse_written(held, stage)
            before = self._versions(value)
            # The kept tensors are detached, which cleared `requires_grad`: set it as in the first run.
            for tensor, needed in zip(tensors_in(value), self.needs_gradient[stage], strict=True):
                tensor.requires_grad_(needed)
            if isinstance(step.operation, ForwardEnable):
                held.attached[stage], output = self._runner(step).attach(
                    value, surroundings, self.context, skip_output=step.skips_output
                )
                self._refuse_lost_gradients(stage, held.attached[stage])
            else:
                output = self.runners[stage].again(value, surroundings, self.context)
            if stage + 1 in step.live:
                self._keep(held, stage + 1, output)
            self._refuse_overwritten(stage, value, before)
        except InvalidStateError:
            self._note_changed([stage])
            raise
        held.inputs.drop_all_but(step.live)

    def _refuse_lost_gradients(self, stage: int, attached: AttachedStage) -> None:
        """Raise InvalidStateError if an output has a gradient now, though the node has marked it as having none."""
        runner = self.runners[stage]
        known = () if draws(runner.function) else recall_effects(runner.function).without_gradient
        if lost := [i for i in known if i < len(attached.outputs) and attached.outputs[i] is not None]:
            text = f"plan again: output {lost[0]} of stage {runner.name!r} has a gradient, and had none when measured"
            raise InvalidStateError(text, kind="rerun_differs", stage=stage, name=runner.name)

    def _without_gradient(self, runner: StageRunner, value: Any, output: Any) -> list[torch.Tensor]:
        """Return output tensors that have no gradient: passed-on inputs without one, and others known by measuring."""
        passed_on = {id(tensor) for tensor in tensors_in(value) if not tensor.requires_grad}
        # Ignore measurements of a stage that skips layers at random: its outputs lack gradients only in some steps.
        known = () if draws(runner.function) else recall_effects(runner.function).without_gradient
        return [tensor for i, tensor in enumerate(tensors_in(output)) if i in known or id(tensor) in passed_on]

    def _note_changed(self, stages: Iterable[int]) -> None:
        self._changed.update(name for stage in stages for name in self.runners[stage].names)

    def _runner(self, step: Step) -> StageRunner:
        assert isinstance(step.operation, ForwardEnable)
        runner, option = self.runners[step.operation.stage], step.operation.option
        return runner if runner.option == option else runner.by(option)

    def _keep(self, held: Held, stage: int, value: Any) -> None:
        if stage not in held.inputs:
            held.inputs.keep(stage, value)
            self._kept[stage] = self._marks(held, stage)

    def _refuse_written(self, held: Held, stage: int) -> None:
        """Raise StageChangedError if the stage's input, or the context, was written to since `_keep`."""
        now = self._marks(held, stage)
        for was, is_now in zip(self._kept.get(stage, now), now, strict=True):
            if was != is_now:
                raise StageChangedError(self.runners[stage].name, "the input", *described(was, is_now))

    def _marks(self, held: Held, stage: int) -> list[Any]:
        return [mark_of(tensor) for tensor in held.inputs.held_tensors(stage) + self._shared]

    def _versions(self, value: Any) -> list[int]:
        return [tensor._version for tensor in tensors_in(value) + self._shared]

    def _refuse_overwritten(self, stage: int, value: Any, before: list[int]) -> None:
        if self._versions(value) != before:
            name = self.runners[stage].name
            text = f"use layer {name!r} without inplace=True, or join it to the layer before: it overwrites its input"
            raise InvalidStateError(text, kind="in_place_input", stage=stage, name=name)


class _MeasuringTape(Tape):
    """A tape that lets a stage overwrite its input: no plan recomputes such a stage, but it has to be measured."""

    def _refuse_overwritten(self, stage: int, value: Any, before: list[int]) -> None: ...

    def _refuse_written(self, held: Held, stage: int) -> None: ...


def single_stage_node(runner: StageRunner) -> Callable[[Any], Any]:
    """Return a function that runs a stage as a `StageNode`, to time it with the Python code that a node takes."""
    return _MeasuringTape([runner], read_sequence(1, Sequence.parse("CF_0, L, Fe_0, B_0"))).forward
