"""Rewrite autograd functions, checkpointed regions, transforms and recurrent layers of a graph before it is cut."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, noop_context_fn

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import c_autograd
from rotor_py.capture.graph.graph_nodes import (
    carries_gradient,
    example_of,
    is_random,
    line_of,
    name_of,
    tensors_of,
    written_by,
)
from rotor_py.errors import UnsupportedModelError
from rotor_py.stage.forward_state import lasting
from rotor_py.stage.saved_tensors import hooks_aside

# TorchDynamo's operator for a model's own `torch.autograd.Function` creates a class in every run. The class holds the
# saved tensors until the next garbage collection. `SavingFunction` lets autograd free them in the backward.


def with_saving_functions(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and name_of(node) == autograd_function_apply.__name__:
            node.target = autograd_function_apply


def autograd_function_apply(forward: fx.GraphModule, backward: fx.GraphModule, *values: Any, **how: Any) -> Any:
    """Run `forward` on `values`. In the backward pass, run `backward` on the gradients and what `forward` saved."""
    return SavingFunction.apply(forward, backward, how, *values)  # type: ignore[no-untyped-call]  # torch's


class SavingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: fx.GraphModule, backward: fx.GraphModule, how: dict[str, Any], *values: Any) -> Any:
        output, saved = forward(*values)
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if dirty := how.get("dirty_idx"):
            ctx.mark_dirty(*(outputs[number] for number in dirty))
        if without_gradient := how.get("non_differentiable_idx"):
            ctx.mark_non_differentiable(*(outputs[number] for number in without_gradient))
        ctx.backward_graph = backward
        ctx.others = [None if isinstance(each, torch.Tensor) else each for each in saved]
        ctx.positions = [number for number, each in enumerate(saved) if isinstance(each, torch.Tensor)]
        # A model may overwrite a tensor that its function set as `ctx.x = x`: save its `.data`, whose version autograd
        # does not check. As an attribute of this `ctx`, the tensor would not be freed in the backward.
        guarded = how.get("saved_for_backward_idx", ())
        ctx.save_for_backward(*(saved[at] if at in guarded else saved[at].data for at in ctx.positions))
        return output

    @staticmethod
    @once_differentiable  # the traced backward cannot itself be differentiated
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        values = list(ctx.others)
        for number, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            values[number] = tensor
        found = ctx.backward_graph(*gradients, *values)
        return None, None, None, *(found if isinstance(found, (tuple, list)) else (found,))


# TorchDynamo captures a region of `torch.utils.checkpoint` as one operator, which draws other random numbers when it
# recomputes, and rejects regions that write into buffers, as batch norm does. So `checkpointed` below replaces it.

# Equal regions share one function, so that stages with equal regions have equal signatures and are measured once.
_functions: dict[Hashable, Callable[..., Any]] = {}


def with_exact_regions(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and name_of(node) == "tag_activation_checkpoint":
            body: Any = getattr(graph.owning_module, str(node.args[0].target))
            with_exact_regions(body.graph)
            body.recompile()
            node.target, node.args = _region_of(body, node.target), node.args[1:]


def _region_of(body: fx.GraphModule, operator: Callable[..., Any]) -> Callable[..., Any]:
    context = body.meta.get("_checkpoint_context_fn", noop_context_fn)
    constants = any(node.op == "get_attr" for node in body.graph.nodes)
    key = "region", context, id(body) if constants else None, _kind_of(body.graph)
    if key not in _functions:

        def checkpointed(*values: Any, **how: Any) -> Any:
            if any(map(torch_compat.is_fake_tensor, values)):
                return operator(body, *values, **how)  # AOTAutograd traces with fake tensors, and knows this operator
            trained = [isinstance(each, torch.Tensor) and each.requires_grad for each in values]
            given = [each if needed else None for each, needed in zip(values, trained, strict=True)]
            # A recomputed stage reads copies of buffers. A region in it must recompute on the model's own buffers.
            later = [None if needed else lasting(each) for each, needed in zip(values, trained, strict=True)]
            others = [later, list(values)]

            def run(*given: Any) -> Any:
                rest = others.pop() if len(others) > 1 else later
                return body(*(given[at] if needed else rest[at] for at, needed in enumerate(trained)))

            return checkpoint(run, *given, **{**how, "use_reentrant": False, "context_fn": context})

        checkpointed.__name__ = checkpointed.__qualname__ = f"checkpointed({_names(body.graph.nodes)})"
        _functions[key] = checkpointed
    return _functions[key]


def with_inference_as_no_grad(graph: fx.Graph) -> None:
    """Replace inference mode by `torch.no_grad`, which computes the same: a stage may begin inside."""
    modes = [True]  # whether gradients are on: outside, and in each region of inference mode that is open
    for node in graph.nodes:
        name = name_of(node) if node.op == "call_function" else ""
        if node.target is torch_compat.set_grad_enabled:
            modes[-1] = bool(node.args[0])
        elif name in ("_enter_inference_mode", "_exit_inference_mode"):
            modes = [*modes, modes[-1] and not node.args[0]] if name == "_enter_inference_mode" else modes[:-1]
            node.target, node.args = torch_compat.set_grad_enabled, (modes[-1],)


# Operators that set how kernels compute, such as `torch.set_default_dtype`, must not move, and no stage may begin after
# one. So all operators from the first of them to the one that sets the former values again become one node.

_SETTERS = {"set_default_dtype", "set_float32_matmul_precision", "_set_deterministic_algorithms", "_sdpa_kernel"}


def with_whole_settings(graph: fx.Graph) -> None:
    before = torch_compat.settings_now()
    region: list[fx.Node] = []
    changed = False
    try:
        for node in list(graph.nodes):
            was = changed
            if node.op == "call_function" and name_of(node) in _SETTERS:
                function: Any = node.target
                # Arguments that are nodes are names of kernels.
                function(*fx.node.map_arg(node.args, lambda each: cast(Any, each.target)(*each.args)), **node.kwargs)
                changed = before != torch_compat.settings_now()
                if changed and not was:
                    region = node.all_input_nodes
            if changed or was:
                region.append(node)
            if was and not changed:
                _replace(graph, region)
    finally:
        _set_all(before)


def _set_all(values: Iterable[Any]) -> None:
    for each, value in zip(torch_compat.SETTINGS, values, strict=True):
        each.set(value)


# Inside `torch.vmap` and other transforms, operators work on wrapped tensors, which have no memory of their own and do
# not tell whether they require a gradient. So such a region becomes one node, which takes and returns plain tensors.
# Inside `torch.func.grad`, PyTorch allows no saved-tensor hooks. So what autograd saves in its region calls no hooks.

_TRANSFORMS = ("_vmap", "_grad", "_jvp")
_ENTER = {f"{name}_increment_nesting" for name in _TRANSFORMS}
_EXIT = {f"{name}_decrement_nesting" for name in _TRANSFORMS}
_WITHOUT_HOOKS, _WITH_HOOKS = c_autograd._saved_tensors_hooks_disable, c_autograd._saved_tensors_hooks_enable


def with_whole_transforms(graph: fx.Graph) -> None:
    """Make each region of `torch.func` transforms one node. Raises UnsupportedModelError if one writes into inputs."""
    region: list[fx.Node] = []
    depth, without_hooks = 0, False
    for node in list(graph.nodes):
        name = name_of(node) if node.op == "call_function" else ""
        depth += name in _ENTER
        without_hooks |= node.target is _WITHOUT_HOOKS
        if depth or without_hooks or _hands_on_wrapped(region):
            region.append(node)
        depth -= name in _EXIT
        without_hooks &= node.target is not _WITH_HOOKS
        if region and not (depth or without_hooks or _hands_on_wrapped(region)):
            _replace(graph, region)
            region = []


def _hands_on_wrapped(region: list[fx.Node]) -> bool:
    """Whether later nodes read a wrapped tensor of `region`, as the function that `torch.func.vjp` returns does."""
    members, wrapped = set(region), torch_compat.is_functorch_wrapped_tensor
    handed_on = (node for node in region if not members.issuperset(node.users))
    return any(wrapped(tensor) for node in handed_on for tensor in tensors_of(node))


def _replace(graph: fx.Graph, region: list[fx.Node]) -> None:
    members = set(region)
    inputs = list(dict.fromkeys(each for node in region for each in node.all_input_nodes if each not in members))
    outputs = [node for node in region if any(user not in members for user in node.users)]
    for node in region:
        if not set(inputs).isdisjoint(written_by(node)):
            raise UnsupportedModelError(
                f"let {line_of(node)} make a new tensor: inside a function that torch.func transforms, or where the "
                "model has set how kernels compute, it overwrites a tensor from outside, so it cannot be recomputed",
                kind="in_place_input",
                name=line_of(node),
            )
    with graph.inserting_before(region[0]):
        whole = graph.call_function(_function_of(region, inputs, outputs), tuple(inputs))
        whole.meta = {**region[0].meta, "example_value": tuple(example_of(node) for node in outputs)}
        for number, node in enumerate(outputs):
            taken = graph.call_function(operator.getitem, (whole, number))
            taken.meta = dict(node.meta)
            node.replace_all_uses_with(taken, lambda user: user not in members)
    for node in reversed(region):
        graph.erase_node(node)


def _function_of(region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Callable[..., Any]:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    for node in region:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    key = _kind_of(graph)
    if key not in _functions:
        module = fx.GraphModule(torch.nn.Module(), graph, "TransformedFunction")
        without_hooks = any(node.target is _WITHOUT_HOOKS for node in region)
        sets = not _SETTERS.isdisjoint(map(name_of, region))

        def transformed(*values: Any) -> Any:
            level, settings = torch_compat.maybe_current_level(), torch_compat.settings_now() if sets else None
            with hooks_aside() if without_hooks else nullcontext():
                try:
                    return type(module).forward(module, *values)
                except BaseException:
                    # Generated code has no `with` blocks, so leave transforms and settings here after an error.
                    while torch_compat.maybe_current_level() != level:
                        torch_compat.pop_dynamic_layer_stack()
                    _WITH_HOOKS()
                    if settings is not None:
                        _set_all(settings)
                    with suppress(RuntimeError):  # raised if no level of forward-mode derivatives is entered
                        torch_compat.exit_dual_level(level=0)
                    raise

        transformed.__name__ = transformed.__qualname__ = f"transformed({_names(region)})"
        _functions[key] = transformed
    return _functions[key]


def _kind_of(graph: fx.Graph) -> Hashable:
    names = {node: f"%{number}" for number, node in enumerate(graph.nodes)}  # not just 1, which may be an argument
    given = [fx.node.map_arg((node.args, node.kwargs), names.__getitem__) for node in graph.nodes]
    pairs = zip(graph.nodes, given, strict=True)
    return tuple((node.op, node.op != "placeholder" and node.target, *map(str, each)) for node, each in pairs)


def _names(nodes: Iterable[fx.Node]) -> str:
    # This text is part of a function's name. `is_random` and others look for operators' names in it.
    calls = (node for node in nodes if node.op.startswith("call"))
    return ", ".join(name_of(node) + (" at random" if is_random(node) else "") for node in calls)


# The CPU runs the layers of `nn.LSTM(…, num_layers=4)` one by one. With one operator for each layer, the result is the
# same to the bit, and a stage may end between layers. On CUDA, cuDNN runs all layers at once: they are not split.

_OPERATORS = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class _Arguments(NamedTuple):
    """Arguments of a recurrent operator, nodes or constants. For an LSTM, `state` is a pair of tensors."""

    value: Any
    state: Any
    weights: Any
    biases: Any
    layers: Any
    dropout: Any
    training: Any
    bidirectional: Any
    batch_first: Any

    @property
    def drops(self) -> bool:
        probability = self.dropout
        if isinstance(probability, fx.Node):  # TorchDynamo made a float an input, as its value changed between traces
            probability = probability.meta["example_value"].node.hint
        return bool(self.training and self.layers > 1 and probability)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the node is a recurrent operator with dropout between its layers."""
    return node.target in _OPERATORS and _Arguments(*node.args).drops


def draws_from_own_state(node: fx.Node) -> bool:
    """Whether the node draws random numbers from cuDNN's own state, which cannot be restored."""
    on_cuda = any(tensor.device.type == "cuda" for tensor in tensors_of(node))
    return on_cuda and torch.backends.cudnn.enabled and draws_random_numbers(node)


def with_layers_apart(graph: fx.Graph) -> None:
    """Split recurrent operators on the CPU into one for each layer, which gives the same result to the bit."""
    for node in list(graph.nodes):
        if node.target not in _OPERATORS or any(user.target is not operator.getitem for user in node.users):
            continue
        arguments = _Arguments(*node.args)
        states = arguments.state if isinstance(arguments.state, tuple) else (arguments.state,)
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_of(node))
        if on_cpu and arguments.layers > 1 and all(isinstance(state, fx.Node) for state in states):
            _divide(node, arguments, states)


def _divide(node: fx.Node, given: _Arguments, states: tuple[fx.Node, ...]) -> None:
    """Replace a recurrent operator by one for each layer; give each new node a fake example value."""

    def call(target: Any, args: tuple[Any, ...], example: Any) -> fx.Node:
        with node.graph.inserting_before(node):
            made = node.graph.call_function(target, args)
        made.meta = {**node.meta, "example_value": example}
        return made

    def transposed(value: fx.Node) -> fx.Node:
        return call(torch.transpose, (value, 0, 1), value.meta["example_value"].transpose(0, 1))

    # Make time the first dimension, as inside the original operator, so that dropout drops the same elements.
    example, *ends = node.meta["example_value"]
    value = given.value
    if given.batch_first:
        example, value = example.transpose(0, 1), transposed(value)
    directions = 2 if given.bidirectional else 1
    count = len(given.weights) // given.layers
    last_states: list[list[fx.Node]] = []  # for each layer, its state after the last time step (LSTMs: two tensors)
    for layer in range(given.layers):
        weights = list(given.weights[layer * count : (layer + 1) * count])
        start = layer * directions
        begin = tuple(
            call(torch.narrow, (each, 0, start, directions), each.meta["example_value"].narrow(0, start, directions))
            for each in states
        )
        trained = any(map(carries_gradient, [value, *weights, *begin])) and carries_gradient(node)
        last = layer == given.layers - 1
        made = example if last else torch.empty_like(example.detach())
        if not made.requires_grad:
            made.requires_grad_(trained)
        results = (made, *(torch.empty_like(s.detach()[:directions]).requires_grad_(trained) for s in ends))
        state: Any = begin if isinstance(given.state, tuple) else begin[0]
        rest = (given.biases, 1, 0.0, given.training, given.bidirectional, False)
        whole = call(node.target, (value, state, weights, *rest), results)
        value, *ended = [call(operator.getitem, (whole, at), found) for at, found in enumerate(results)]
        last_states.append(ended)
        if given.drops and not last:
            dropped = torch.empty_like(made.detach()).requires_grad_(made.requires_grad)
            value = call(F.dropout, (value, given.dropout, True), dropped)
    output = transposed(value) if given.batch_first else value
    for user in list(node.users):
        position: Any = user.args[1]
        new = output
        if position != 0:
            found = [each[position - 1] for each in last_states]
            new = call(torch.cat, (found,), torch.cat([each.meta["example_value"].detach() for each in found]))
        new.meta["example_value"] = user.meta["example_value"]
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


REWRITES = (
    with_exact_regions,
    with_saving_functions,
    with_inference_as_no_grad,
    with_whole_settings,
    with_whole_transforms,
    with_layers_apart,
)
"""All rewrites of a graph, in their order."""
