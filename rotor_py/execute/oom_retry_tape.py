"""Recover from an out-of-memory error: undo the work in progress and recompute it by a plan that needs less.

# Note [Running again after an out-of-memory error]
#
#  1. Every stage is a `StageNode`, even a stored one: the engine runs the backward of plain operators itself, and
#     the tape cannot repeat it. The tape holds the graph of a stored stage, like that of a recomputed one.
#  2. The tape keeps the chain's input until the backward of stage 0, since all else can be computed from it. The tape
#     records the forward state of every stage.
#  3. A failed forward leaves one side effect: the stage in progress may have changed buffers, objects in its input, and
#     the random state. The tape restores these, and runs the whole forward again, in new nodes. Stages that had
#     completed are recomputed in the state of their first run, and change nothing; the others run for the first time.
#  4. A failed backward leaves no side effect. Let stage i be in progress. The stages after it in the chain have passed
#     their gradients to the engine. Stage i passes all of its gradients at once, when it is done. So 0 … i remain,
#     and the gradient of their output is in memory. The tape releases everything held for them and recomputes them
#     from the chain's input.
#  5. A recompute begins after the `except` block, when nothing refers to the error: its traceback would hold the
#     tensors of all frames.
#  6. If a recompute might not be exact, the tape raises the error, with a note that says why: the chain's input or a
#     parameter was written to since the forward, the stage in progress may have called hooks on gradients, or a buffer
#     without a copy has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Operations
from dataclasses import replace
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from rotor_profiling import bytes_like
from rotor_profiling.attributes import Attributes, leaves_tensors
from rotor_profiling.isolate import RandomState, buffer_slots
from rotor_profiling.storage import tensors_in
from rotor_profiling.value_tree import tree_map_only
from rotor_py.execute.backward_passes import Held, Passes
from rotor_py.execute.instructions import Instructions, Runners, from_input, read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage.error_context import is_out_of_memory
from rotor_py.stage.forward_state import slots_that_move
from rotor_py.stage.named_state import NamedState, locations_in
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable, Sequence


class SmallerPlans(Protocol):
    """Makes plans that need less memory than the last one. Where there is none, adds a note to `error`, returns None.

    `inexact` says why a recompute would not give equal results, so that no plan is made; None if it would.
    """

    def whole(self, error: BaseException, inexact: str | None) -> Sequence | None:
        """Return a plan for the whole chain, after `error` in its forward."""

    def rest(self, error: BaseException, inexact: str | None, stages: int) -> Sequence | None:
        """Return a plan for the backward of the first `stages` stages, in which `error` was raised."""

    def rest_as_before(self, stages: int) -> Sequence:
        """Return a plan for another backward of the first `stages` stages, after one in which `rest` made a plan."""


class Undo:
    """The state before a forward of `function` on `value`, to restore if that fails. Copies only changing buffers."""

    def __init__(self, function: Callable[..., Any], devices: tuple[torch.device, ...], value: Any) -> None:
        self._random = RandomState.now(devices)
        self._given = NamedState(locations_in(value))
        self._attributes = Attributes(function)
        self._copies = [(slot, slot[2].clone()) for slot in slots_that_move(function)]
        copied = {id(tensor) for (_, _, tensor), _ in self._copies}
        # Do not copy the other buffers, which measuring has not seen change. If one does, `restore` says so.
        self._others = [(slot, slot[2]._version) for slot in buffer_slots(function) if id(slot[2]) not in copied]

    def restore(self) -> str | None:
        """Restore the recorded state. Return why a change cannot be undone; None if every change is undone."""
        self._random.restore()
        self._given.put_back()
        try:
            self._attributes.put_back()
        except RuntimeError as error:
            return str(error)
        for (table, name, tensor), before in self._copies:
            table[name] = tensor
            # Do not write to unchanged buffers: torch refuses writes to an expanded scalar, for example.
            if not torch.equal(tensor, before):
                # Write through `data`, which leaves the version counter: an earlier graph may hold the buffer.
                tensor.data.copy_(before)
        for (table, name, tensor), version in self._others:
            if table[name] is not tensor or tensor._version != version:
                return f"buffer {name!r} has changed for the first time, so there is no copy to restore it from"
        return None


def undo_bytes(functions: Iterable[nn.Module]) -> int:
    return max((bytes_like(slot[2] for slot in slots_that_move(function)) for function in functions), default=0)


class OOMRetryTape(Tape):
    """A tape that recomputes after an out-of-memory error, by a plan that `plans` makes. All stages are modules."""

    why_a_node = 'which on_oom="replan" may have to recompute; leave on_oom out'

    def __init__(
        self,
        runners: Operations[StageRunner] | Runners,
        instructions: Instructions,
        plans: SmallerPlans,
        context: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(runners, instructions, context=context)
        self._plans = plans
        self._follow(instructions)
        self._input: Any = None
        self._devices: tuple[torch.device, ...] = ()
        # versions of the chain's input, and of every stage's parameters, before the forward
        self._then: list[list[int]] = []
        self._not_undone: str | None = None
        self._left: dict[int, list[ref[torch.Tensor]]] = {}  # maps stages to the further outputs of their nodes

    def forward(self, value: Any) -> Any:
        self._input = tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        self._devices = self.runners[0].devices(value, self.context)
        self._then = self._written(len(self.runners))
        while True:
            try:
                return super().forward(value)
            except RuntimeError as error:
                if not is_out_of_memory(error) or (sequence := self._plans.whole(error, self._not_undone)) is None:
                    raise
            self._follow(read_sequence(len(self.runners), sequence))

    def _follow(self, instructions: Instructions) -> None:
        """Have the next forward follow `instructions`, but with every stage in a `StageNode` (Rule 1)."""
        operations = [step.operation for step in instructions.forward if isinstance(step.operation, ForwardEnable)]
        # maps the stages that the forward stores to their storage options
        self._stored = {each.stage: each.option for each in operations if each.stage in instructions.in_graph}
        nodes = replace(
            instructions,
            pieces=tuple((step,) for step in instructions.forward),
            in_graph=frozenset(),
            recomputed=frozenset(range(len(instructions.backward_at))),
            awaited=frozenset(),
        )
        self._begin_anew(nodes)

    def run_first(self, stage: int, value: Any, left: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        before, known, attached, output = self._versions(value), stage in self.surroundings, None, None
        runner = self.runners[stage].by(self._stored.get(stage, 0))
        if known:  # attributes have the tensors of the run before the error
            left += [tensor for each in self._left[stage] if (tensor := each()) is not None]
        elif stage in self._stored and not leaves_tensors(runner.function):
            attached, output, self.surroundings[stage] = self._undone_on_error(runner, runner.attach_first, value, left)
        else:  # tensors in attributes must not be part of the graph that the tape holds
            output, self.surroundings[stage] = self._undone_on_error(runner, runner.first, value, left)
        self._left[stage] = [ref(tensor) for tensor in left]
        if stage in self._stored:
            if attached is None:
                attached, again = runner.attach(value, self.surroundings[stage], self.context)
                output = again if known else output
            self._held.attached[stage], same = attached, {id(tensor) for tensor in left}
            output = tree_map_only(torch.Tensor, lambda each: each if id(each) in same else each.detach(), output)
            silent = [each for each, edge in zip(tensors_in(output), attached.outputs, strict=False) if edge is None]
        else:
            output = runner.again(value, self.surroundings[stage], self.context) if known else output
            silent = self._without_gradient(runner, value, output)
        self._refuse_overwritten(stage, value, before)
        return output, silent

    def _undone_on_error(self, runner: StageRunner, run: Any, value: Any, left: list[torch.Tensor]) -> Any:
        undo = Undo(runner.function, runner.devices(value, self.context), value)
        try:
            return run(value, self.context, left)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._not_undone = undo.restore()
            raise

    def backward(self, stage: int, gradients: Operations[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if stage not in self.instructions.backward_at and self.passes.left is not None:
            # An earlier pass failed at a stage before this one, and left only the chain's input.
            self._begin_anew(from_input(stage + 1, self._plans.rest_as_before(stage + 1)), self._input)
        random = RandomState.now(self._devices)
        while True:
            try:
                found = super().backward(stage, gradients)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error) or (
                    (sequence := self._plans.rest(error, self._inexact(stage), stage + 1)) is None
                ):
                    raise
            random.restore()
            self._begin_anew(from_input(stage + 1, sequence), self._input)
        if stage == 0 and self.passes.left is None:
            self._input = None
        return found

    def _begin_anew(self, instructions: Instructions, value: Any = None) -> None:
        """Release all held values, hold the chain's input `value` unless it is None, and follow `instructions`."""
        held = Held()
        if value is not None:
            held.inputs.keep(0, value)
        self._held, self.passes, self.instructions = held, Passes(held, instructions), instructions

    def _inexact(self, stage: int) -> str | None:
        """Return why stages 0 … `stage` cannot be recomputed exactly; None if they can."""
        if self._written(stage + 1) != self._then[: stage + 2]:
            return "the input or a parameter was written to after the forward"
        modules = _module_of(self.runners[stage]).modules()
        if any(module._backward_hooks or module._backward_pre_hooks for module in modules):
            return f"stage {self.runners[stage].name!r} has hooks on gradients, which may have been called"
        return None

    def _written(self, stages: int) -> list[list[int]]:
        modules = [_module_of(self.runners[stage]) for stage in range(stages)]
        return [self._versions(self._input), *([each._version for each in module.parameters()] for module in modules)]


def _module_of(runner: StageRunner) -> nn.Module:
    assert isinstance(runner.function, nn.Module)
    return runner.function
