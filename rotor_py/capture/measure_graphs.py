"""Measure all captured graphs of a model in one forward: cut and measure each graph when the forward calls it."""

from __future__ import annotations

import inspect
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import rotor_profiling
from rotor_profiling import (
    RandomState,
    buffers_kept,
    bytes_like,
    has_loss,
    isolated,
    leaves_of,
    loss_layouts,
    measure_loss,
    storage_bytes,
    storages,
    tensors_in,
)
from rotor_profiling.attributes import attributes_kept
from rotor_profiling.backends import operators
from rotor_profiling.contents import with_own_containers
from rotor_profiling.isolate import own_parametrizations, undoing
from rotor_profiling.stage.gradients import enter_graph
from rotor_py.capture.captured_forward import CapturedForward
from rotor_py.capture.captured_graph import CapturedGraph, written_input
from rotor_py.capture.graph.graph_nodes import line_of, name_of
from rotor_py.capture.variants import CompileBudgetOf, MeasuredGraph, MeasuredGraphs, compiled_variants, whole_step
from rotor_py.compile.compiled_stage import StageCompiler
from rotor_py.distributed.processes import largest_anywhere
from rotor_py.distributed.sharding import as_left, sharding_of
from rotor_py.errors import UnsupportedModelError
from rotor_py.measure.cut import Cut, cut_layers
from rotor_py.measure.planning_lock import freeze_again
from rotor_py.measure.stage_measurer import MeasuringOptions, StageMeasurer, unmeasured_loss
from rotor_py.units import format_bytes

# Tensors that autograd saves outside captured graphs cannot be planned, as code between graphs is not recomputed.

# Folders of torch and of this project. Errors name the innermost line of the stack that is in none: the user's line.
_FILES = torch.__file__, rotor_profiling.__file__, str(Path(__file__).parent)
_LIBRARIES = [Path(file).resolve().parent for file in _FILES]
_RECURRENT = inspect.getsourcefile(nn.RNNBase)


class SavedOutside(saved_tensors_hooks):
    """Record the bytes that autograd saves outside captured graphs, and the lines of the model that save them. Storages
    at the addresses `known`, such as parameters, do not count.
    """

    def __init__(self, known: set[int]) -> None:
        self.known = known
        self.bytes: dict[int, int] = {}
        self.lines: Counter[str] = Counter()
        self.writing: set[str] = set()  # lines that write into tensors which graphs get, and are no buffers
        self.line: str | None = None  # the line to which to ascribe all bytes; if None, the user's innermost line
        self.packed_line: str | None = None  # the last line that runs a recurrent layer on a packed sequence, if any
        # Disable tracing: TorchDynamo would trace the hooks with the model, and recompile for each dtype and layout.
        super().__init__(torch.compiler.disable(self._note), torch.compiler.disable(lambda tensor: tensor))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        # Count each storage once: several operators may save the same tensor, or views of it.
        new = {at: size for at, size in storages([tensor]).items() if at not in self.known and at not in self.bytes}
        if new:
            self.bytes |= new
            frame = next((each for each in reversed(traceback.extract_stack()) if is_users(each.filename)), None)
            line = self.line or ("an unknown line" if frame is None else f"{frame.filename}:{frame.lineno}")
            # In the forward of `nn.RNNBase`, `batch_sizes` is not None for a packed sequence. TorchDynamo renames
            # functions, so find the forward by its file.
            if any(
                each.f_code.co_filename == _RECURRENT and each.f_locals.get("batch_sizes") is not None
                for each, _ in traceback.walk_stack(None)
            ):
                self.packed_line = line
            self.lines[line] += sum(new.values())
        return tensor.detach()  # else, an autograd node that saves its own result would be in a cycle, never freed


def is_users(file: str) -> bool:
    path = Path(file)
    return path.suffix == ".py" and not any(library in path.resolve().parents for library in _LIBRARIES)


# Upper bounds of the bytes that autograd saves outside the graphs, as shares of those that the graphs save. Guesses:
# more than a fifth is better planned as a model of its own; bytes of packed sequences differ from batch to batch, so
# they stay below the 2 % by which measured peaks may differ from predictions.
_MOST_OUTSIDE = 0.2
_MOST_PACKED = 0.01


def measure_graphs(
    forward: CapturedForward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    options: MeasuringOptions,
    *,
    compiler: StageCompiler | None = None,
    room: CompileBudgetOf | None = None,
) -> MeasuredGraphs:
    """Capture and measure all graphs of a model, and the loss. With a `compiler`, also compile the main graph and
    measure its code. Leaves the model and the random state unchanged. Raises UnsupportedModelError if no graph needs a
    gradient or too much is saved outside of graphs; UnusableLossError if the loss cannot be used; the model's errors.
    """
    model = forward.model
    found = MeasuredGraphs()
    sharding = sharding_of(model, mixed_precision=True)
    inputs = storages(tensors_in([args, kwargs]))
    # Do not count parameters and buffers that autograd saves: their memory exists anyway.
    outside = SavedOutside(set(storages([*model.parameters(), *model.buffers()])))

    def run(graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
        freeze_again()
        # Suspend the hooks: graphs are measured below. Enter `operators` only here: TorchDynamo must not trace in it.
        with outside.suspended(), operators():
            graph.split(arguments, agree=partial(_agreed_weights, options.group, device))
            if not graph.layers:
                with outside if graph.trains else torch.no_grad():
                    return graph.run_unplanned(arguments)
            writing = graph.overwriting
            if writing is not None and any(map(inputs.__contains__, storages(graph.overwritten(arguments)))):
                raise written_input(writing)
            outside.line = None if writing is None else line_of(writing)
            outside.writing.update([] if writing is None else [line_of(writing)])
            with nullcontext() if writing is None else outside:  # autograd may save tensors for writes into inputs
                value, values = graph.enter(arguments)
            outside.line = None
            # `input_owned`: code outside the graph holds the graph's inputs, so a plan cannot free them.
            cut = replace(cut_layers(graph.layers, value, device, sharding), input_owned=True)
            stages = StageMeasurer(cut, value, device, options, silent=graph.silent)
            # As if operators had made them: autograd forbids in-place writes into leaves.
            made = enter_graph(torch.empty(0, requires_grad=True), stages.walk(options.progress))
            returned = tuple(map(weakref.ref, tensors_in(made)))
            context, loss = graph.context_cost(arguments, device), unmeasured_loss(device, options.loss_temp_bytes)
            outputs = graph.leave(made, values)
            around = tuple(map(weakref.ref, tensors_in([arguments, outputs])))
            earlier = storages(
                tensor for each in found.graphs for ref in each.returned if (tensor := ref()) is not None
            )
            extra = _later_graph_bytes(graph, cut, value, arguments, earlier, device) if found.graphs else (0, 0)
            found.graphs.append(MeasuredGraph(graph, cut, stages, context, loss, value, returned, around, *extra))
        return outputs

    with undoing() as undo, attributes_kept(model), buffers_kept(model), own_parametrizations(), forward.measuring():
        # Measuring runs stages several times, and each run may draw random numbers.
        undo.append(RandomState.now((device,)).restore)
        try:
            with outside:
                # Copy dicts, lists and iterators among the arguments, since a forward may change them.
                output = forward.call(with_own_containers(args), with_own_containers(kwargs), run)
            found.output = as_left(model, output)  # cast as FSDP's hook on the model does, which has not been called
            found.outputs_held = options.outputs_held or not has_loss(found.output)
        except RuntimeError as error:
            stack = traceback.extract_tb(error.__traceback__)
            theirs = [frame for frame in stack if is_users(frame.filename)]
            if stack[-1].filename == torch.autograd.graph.__file__ and theirs:  # the forward has called `autograd.grad`
                line = f"{theirs[-1].filename}:{theirs[-1].lineno}"
                text = f"use torch.func.grad at {line}, or plan other parts of {type(model).__name__}, as in model.body"
                text += " = Checkpointable(model.body, ...): there the forward computes gradients, and a plan cannot "
                text += "run a backward in a forward"
                raise UnsupportedModelError(text, kind="backward_in_forward", name=line) from error
            raise
        found.outside_bytes = sum(outside.bytes.values())
        found.outside_scratch = 4 * max(outside.bytes.values(), default=0)
        captured_bytes = sum(each.saved_bytes for each in found.graphs)
        _refuse_much_outside(type(model).__name__, outside, captured_bytes, forward.breaks_at)
        if not found.graphs:
            name = type(model).__name__
            text = f"TORCH_LOGS=graph_breaks says why TorchDynamo found no graph that trains in the forward of {name}"
            raise UnsupportedModelError(text, kind="no_graph", name=name)
        main = found.main
        # Do not count what the budget counts anyway: parameters, the batch, and the main graph's inputs and outputs.
        known = tensors_in([args, kwargs, [each() for each in main.around]])
        counted = storages([*model.parameters(), *model.buffers(), *known])
        found.returned_bytes = storage_bytes(tensors_in(found.output), owned_elsewhere=counted)
        del known
        passed_on = [each for graph in found.graphs for each in graph.graph.passed_on]
        # The budget counts gradients of parameters that exist before the step.
        uncounted = [each for each in passed_on if options.fresh_gradients or not isinstance(each, nn.Parameter)]
        found.passed_on_bytes = bytes_like(uncounted)
        if options.loss is not None:
            trained_bytes = storage_bytes(tensor for tensor in tensors_in(found.output) if tensor.requires_grad)
            with operators():
                found.loss = measure_loss(options.loss, found.output, device=device, output_bytes=trained_bytes)
                found.layouts = loss_layouts(options.loss, found.output, device)
                found.settle(main)
            # If the loss function reads an output that is no scalar, the model itself returns no loss: a scalar among
            # its outputs, such as CLIP's logit scale, is none. The caller then holds the outputs.
            read = zip(tensors_in(found.output), found.layouts, strict=True)
            found.outputs_held |= any(tensor.dim() and strides is not None for tensor, strides in read)
        if compiler is not None:
            # With several processes, compile stage by stage only: as a whole, each might get another partition.
            fits = room if options.group is None else None
            budget = None if fits is None else fits(whole_step(found, main.measurement), main.shared)
            agree = partial(largest_anywhere, group=options.group, device=device)
            found.variants = compiled_variants(main, compiler, options.progress, budget, agree)
            for variant in found.variants:
                found.settle(variant)
    return found


def _later_graph_bytes(
    graph: CapturedGraph,
    cut: Cut,
    value: Any,
    arguments: Sequence[Any],
    earlier: dict[int, int],
    device: torch.device,
) -> tuple[int, int]:
    """Return the bytes of earlier graphs' results that `graph` saves, and the bytes that its context makes."""
    made, saved = storage_bytes(tensors_in(value), owned_elsewhere=storages(tensors_in(arguments))), set[int]()
    if any(name_of(node).startswith("checkpointed(") for node in graph.graph_module.graph.nodes):
        return sum(earlier.values()), made  # an upper bound, as checkpointed regions do not call hooks when they save

    def note(tensor: torch.Tensor) -> Any:  # returns None, so that autograd keeps nothing: there is no backward
        saved.update(storages([tensor]))

    with saved_tensors_hooks(note, note):
        for _, function in cut.stages:
            with isolated(function, device), torch.enable_grad():
                value = leaves_of(function(leaves_of(value)))
    return sum(size for address, size in earlier.items() if address in saved), made


def _agreed_weights(group: dist.ProcessGroup | None, device: torch.device, weights: list[int]) -> list[int]:
    try:  # weights differ where processes have shards of different sizes
        return largest_anywhere(weights, group, device)
    except ValueError as error:
        raise UnsupportedModelError(
            "call measure() in all processes with the same model and inputs of the same shape: they have captured "
            f"graphs with different operators: {error}",
            kind="different_graphs",
        ) from None


def _refuse_much_outside(model: str, outside: SavedOutside, captured_bytes: int, breaks_at: str | None) -> None:
    outside_bytes = sum(outside.bytes.values())
    if outside.packed_line is not None and outside_bytes > _MOST_PACKED * captured_bytes:
        raise UnsupportedModelError(
            f"pass the padded tensor to the recurrent layer at {outside.packed_line} of {model}, and leave the padding "
            "out of the loss: the memory of a packed sequence depends on the lengths in each batch",
            kind="packed_sequence",
            name=outside.packed_line,
        )
    if outside_bytes <= _MOST_OUTSIDE * captured_bytes:
        return
    ((line, _),) = outside.lines.most_common(1)
    if breaks_at is None and line in outside.writing:
        text = f"make the tensor that is written to at {line} of {model} a buffer, by register_buffer: what runs "
        text += "before the write cannot be planned, since recomputations restore no other tensor of the model"
        raise UnsupportedModelError(text, kind="written_outside", name=line, outside_bytes=outside_bytes)
    raise UnsupportedModelError(
        f"{line} of {model} runs outside the graphs that TorchDynamo captures. Of the memory saved for the backward, "
        f"{format_bytes(outside_bytes)} cannot be planned, and {format_bytes(captured_bytes)} can. If the graph break "
        f"at {breaks_at or 'the line that TORCH_LOGS=graph_breaks names'} is inside a loop, move it before the loop, "
        "or plan a part of the model: model.body = Checkpointable(model.body, ...)",
        kind="outside_graphs",
        name=line,
        outside_bytes=outside_bytes,
        captured_bytes=captured_bytes,
    )
