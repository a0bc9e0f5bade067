"""Replay a sequence inside autograd.

# Note [Replaying a sequence inside autograd]
#
# The chain becomes part of the caller's graph, one stage after the other, and the engine walks it backwards.
#
#  1. A stage whose first forward is `Fe` runs as in plain training: its own operators are in the caller's graph, and
#     the engine runs its backward. It costs what plain autograd costs, because it is plain autograd.
#  2. Every other stage is one node of the graph, with the stage's parameters among its inputs. The engine so knows
#     every parameter: hooks fire, `autograd.grad` finds them, gradients leave as soon as they are made.
#  3. All nodes of one forward share a tape. A node's backward makes the tape run the operations up to and including
#     the `B` of its stage.
#  4. The first run of a stage moves buffers and the random state; what it found around it is recorded. A later run
#     finds the same (random state, autocast, buffers) and leaves no trace.
#  5. Inputs that the tape keeps are detached: the tape holds values, the graph holds history. Nothing that the tape
#     holds refers to the graph, so there are no cycles, and dropping the output drops everything.
#  6. The tape lets go of an input as soon as no later operation reads it.
#  7. The inner graph of a stage that was run again ends at aliases of the parameters, and at an entry that holds no
#     tensor (see `StageRunner.attach`): an input that the backward does not need is freed as in plain training.
#  8. A backward pass is known by its graph task. One that retains the graph works on a copy of what the tape holds, so
#     that another can follow; one that does not takes it along, and a second one is refused.
#  9. Forwards that a sequence has right before the backward of a stage of rule 1 run from a hook on that stage's
#     output, when its gradient arrives. No solver makes such sequences; hands may.
# 10. An error ends the forward or the backward pass in which it is raised. What was held for it is let go at once: the
#     error's traceback would keep it otherwise. What a retained graph holds stays for the next pass, as in plain
#     training.
# 11. Nobody reads what a forward right before the backward of its stage puts out: it is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Operations
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rotor_profiling.storage import tensors_in
from rotor_py.execute.program import Program, Step, program
from rotor_py.execute.store import ActivationStore
from rotor_py.stage.attached import AttachedStage
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.surroundings import Surroundings
from rotor_solver import Backward, ForwardEnable, Sequence


class CheckpointOptim(torch.autograd.Function):
    """The autograd function that replays a sequence; one node per stage that is not in the graph from the start."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run a chain forward so that its backward follows a sequence.

        `apply(functions, sequence, names, preserve_rng_state, arg)`: `functions` are the stages (modules, or callables
        without parameters), each called with what the one before returned, the first with `arg`; `sequence` is a
        `Sequence` or its text; `names` name the stages in errors. Stages that draw random numbers draw the same ones
        again if `preserve_rng_state`. Returns what the last stage returned. ValueError for an invalid sequence.
        """
        functions, sequence, names, preserve_rng_state, arg = args
        runners = [
            StageRunner(function, name, preserve_rng_state) for function, name in zip(functions, names, strict=True)
        ]
        if isinstance(sequence, str):
            sequence = Sequence.parse(sequence)
        return replay(runners, program(len(runners), sequence), arg)

    @staticmethod
    def forward(ctx: Any, tape: Tape, stage: int, spec: TreeSpec, leaves: list[Any], *tensors: torch.Tensor) -> Any:
        ctx.tape, ctx.stage = tape, stage
        ctx.set_materialize_grads(False)
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in leaves]
        value = tree_unflatten(leaves, spec)
        del leaves
        before = tape.versions(stage, value)
        output, tape.surroundings[stage] = tape.runners[stage].first(value)
        tape.refuse_overwritten(stage, value, before)
        ctx.mark_non_differentiable(*_without_gradient(tape.runners[stage], value, output))
        flat, tape.output_specs[stage] = tree_flatten(output)
        tape.output_leaves[stage] = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        return tuple(leaf for leaf in flat if isinstance(leaf, torch.Tensor))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True cannot go through stage {ctx.tape.runners[ctx.stage].name!r}, which is recomputed "
                "in the backward; raise the memory limit until it is stored, or train this loss without Checkpointable"
            )
        return None, None, None, None, *ctx.tape.backward(ctx.stage, gradients)


_TENSOR = object()


@dataclass(slots=True)
class _Held:
    """What the tape holds: inputs a_i (detached), and stages run with a graph of their own, by stage."""

    inputs: ActivationStore = field(default_factory=ActivationStore)
    attached: dict[int, AttachedStage] = field(default_factory=dict)

    def clear(self) -> None:
        self.inputs.clear()
        self.attached.clear()


@dataclass(slots=True)
class _Pass:
    """One backward pass over the tape."""

    task: int
    held: _Held
    retain_graph: bool
    position: int = 0


class Tape:
    """The shared state of the nodes of one forward."""

    def __init__(self, runners: list[StageRunner], instructions: Program, store: ActivationStore | None = None) -> None:
        self.runners = runners
        self.program = instructions
        self.surroundings: dict[int, Surroundings] = {}
        self.needs_gradient: dict[int, list[bool]] = {}
        self.output_specs: dict[int, TreeSpec] = {}
        self.output_leaves: dict[int, list[Any]] = {}
        self._held: _Held | None = _Held() if store is None else _Held(store)
        self._pass: _Pass | None = None

    def forward(self, value: Any) -> Any:
        """Run the operations before the loss; return the output, in the caller's graph."""
        held = self._held
        assert held is not None
        try:
            return self._forward(held, value)
        except BaseException:
            held.clear()  # Rule 10
            raise

    def _forward(self, held: _Held, value: Any) -> Any:
        frontier = 0
        for step in self.program.forward:
            stage = step.operation.stage  # type: ignore[union-attr] # no loss here
            if stage < frontier:
                self._run_again(held, step)
                continue
            if stage in self.program.runs_again:
                self.needs_gradient[stage] = [tensor.requires_grad for tensor in tensors_in(value)]
            if stage in step.live:  # Rule 5
                held.inputs.keep_first(stage, value)
            if stage not in self.program.in_graph:
                value = self._node(stage, value)  # Rule 2
            elif stage in self.program.runs_again:
                versions = self.versions(stage, held.inputs.get(stage))
                value, self.surroundings[stage] = self._runner(step).first(value)
                self.refuse_overwritten(stage, held.inputs.get(stage), versions)
            else:
                value = self._runner(step).forward(value)  # Rule 1
            if stage in self.program.awaited:
                self._await(stage, value)
            frontier += 1
            _release(held, step)
        return value

    def _node(self, stage: int, value: Any) -> Any:
        flat, spec = tree_flatten(value)
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        del flat, value
        parameters = self.runners[stage].parameters()
        outputs = iter(_apply_node(self, stage, spec, leaves, *tensors, *parameters))
        made = [next(outputs) if leaf is _TENSOR else leaf for leaf in self.output_leaves.pop(stage)]
        return tree_unflatten(made, self.output_specs.pop(stage))

    def backward(self, stage: int, gradients: Operations[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run the operations up to and including `B` of `stage` (Rule 3)."""
        current = self._current_pass()
        with self._given_up_on_error(current):
            self._advance(current, stage)
            attached = current.held.attached.pop(stage)
            _release(current.held, self.program.replay[self.program.backward_at[stage]])
            return attached.backward(gradients, retain_graph=current.retain_graph)

    def _await(self, stage: int, value: Any) -> None:
        """Run the operations before `B` of a stage in the graph when its backward is about to begin."""
        for tensor in tensors_in(value):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._arrived(stage))

    def _arrived(self, stage: int) -> None:
        current = self._current_pass()
        with self._given_up_on_error(current):
            self._advance(current, stage)

    def _advance(self, current: _Pass, stage: int) -> None:
        """Run the operations before `B` of `stage`."""
        for step in self.program.replay[current.position : self.program.backward_at[stage]]:
            if isinstance(step.operation, Backward):
                current.held.attached.pop(step.operation.stage, None)
                _release(current.held, step)
            else:
                self._run_again(current.held, step)
        current.position = max(current.position, self.program.backward_at[stage])

    @contextmanager
    def _given_up_on_error(self, current: _Pass) -> Iterator[None]:
        """Rule 10: let go of what a pass holds if it ends in an error."""
        try:
            yield
        except BaseException:
            self._pass = None
            current.held.clear()
            raise

    def _current_pass(self) -> _Pass:
        task = torch._C._current_graph_task_id()
        if self._pass is None or self._pass.task != task:
            if self._held is None:
                raise RuntimeError(
                    "this forward was already used by a backward, which freed what it had kept; call backward with "
                    "retain_graph=True the first time, or run the forward again"
                )
            retain = torch._C._autograd._get_current_graph_task_keep_graph()
            held = self._held
            if retain:  # Rule 8
                held = _Held(held.inputs.copy(), dict(held.attached))
            else:
                self._held = None
            self._pass = _Pass(task, held, retain)
        return self._pass

    def _run_again(self, held: _Held, step: Step) -> None:
        stage = step.operation.stage  # type: ignore[union-attr] # a forward
        runner, value, surroundings = self.runners[stage], held.inputs[stage], self.surroundings[stage]  # Rule 4
        before = self.versions(stage, value)
        if isinstance(step.operation, ForwardEnable):
            for tensor, needed in zip(tensors_in(value), self.needs_gradient[stage], strict=True):
                tensor.requires_grad_(needed)
            held.attached[stage], output = self._runner(step).attach(value, surroundings, skip_output=step.skips_output)
        else:
            output = runner.again(value, surroundings)
        if stage + 1 in step.live:
            held.inputs.keep_first(stage + 1, output)
        self.refuse_overwritten(stage, value, before)
        _release(held, step)

    def _runner(self, step: Step) -> StageRunner:
        assert isinstance(step.operation, ForwardEnable)
        return self.runners[step.operation.stage].by(step.operation.option)

    def versions(self, stage: int, value: Any) -> list[int]:
        """How often each tensor that a stage reads was written to."""
        return [tensor._version for tensor in self.runners[stage].read(value)]

    def refuse_overwritten(self, stage: int, value: Any, before: list[int]) -> None:
        """RuntimeError if the run of a stage wrote into its own input, which a later run would read."""
        if self.versions(stage, value) != before:
            raise RuntimeError(
                f"stage {self.runners[stage].name!r} overwrites its own input, which is needed again; use the layer "
                "without inplace=True, or make it one stage with the layer before it"
            )


def replay(runners: list[StageRunner], instructions: Program, value: Any, store: ActivationStore | None = None) -> Any:
    """Run a chain forward on `value`; what it returns is part of the caller's graph.

    Inputs of stages are kept in `store`, if one is given: an empty one, of which the backward makes use.
    """
    tape = Tape(runners, instructions, store)
    return tape.forward(value)


def _apply_node(*args: Any) -> Any:
    """Add a node of `CheckpointOptim`, whose own `apply` takes a whole chain."""
    return torch.autograd.Function.apply.__func__(CheckpointOptim, *args)  # type: ignore[attr-defined] # a classmethod


def _release(held: _Held, step: Step) -> None:
    """Let go of every input that no later operation reads (Rule 6)."""
    held.inputs.drop_all_but(step.live)


def _without_gradient(runner: StageRunner, value: Any, output: Any) -> list[torch.Tensor]:
    """The tensors of `output` that have no gradient in plain training either.

    Those that the stage passes on as they came, and those that are known for it.
    """
    passed_on = {id(tensor) for tensor in tensors_in(value) if not tensor.requires_grad}
    known = runner.effects.without_gradient
    return [tensor for i, tensor in enumerate(tensors_in(output)) if i in known or id(tensor) in passed_on]
