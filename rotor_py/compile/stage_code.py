"""Compile stages with Inductor to code that equal stages share."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from rotor_profiling import torch_compat
from rotor_profiling.isolate import Slot, buffer_slots, substituted
from rotor_profiling.torch_compat import TreeSpec, tree_flatten, tree_unflatten
from rotor_py.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from rotor_profiling.torch_compat import CustomPartitionerFn


# Note [Results of compiled stages]
#
# Inductor's fused operators round differently from eager ones. A planned step promises to give, to the bit, the results
# of the same step with everything stored. So recomputations of a stage must round like its first run:
#
#  1. In a plan, either all runs of a stage are compiled, or none: its `Cut` has the compiled stage or the plain one.
#  2. The code of a stage has the forward and backward of AOTAutograd's partitioner, and a run under `no_grad` runs this
#     forward. Code that saves less (`partitioner.py`) may round differently: a value stored in bfloat16 is recomputed
#     in a register in float32. Such code is a storage mode only if it computes the same outputs, buffers and gradients
#     on the measured input to the bit (`same_bits`); for other batches, equal bits are likely, but not certain. So
#     within a plan, all runs of a stage use one code, the code of its run with gradients (`ways_are_code`). A graph
#     compiled as a whole (`capture/variants.py`) has another partition for each limit. A plan uses one of them, and the
#     results of two are mostly equal to the bit, but not promised to be: sums may be in another order.
#  3. Random state and buffers are restored as for any stage (`stage/forward_state.py`). Generated kernels draw their
#     seed from PyTorch's generator, and pass it to the backward as a saved tensor. Buffers are inputs of the code,
#     which writes into them, so a recomputation gets copies.
#  4. The backward must not reuse saved tensors' memory (`donated_buffer`): a retained graph runs its backward twice.
#  5. Outputs have the strides of eager mode (`keep_output_stride`, Inductor's default), as uncompiled stages that read
#     them expect. Inputs are saved as given, not as copies in another layout (`saving_inputs`).
#
# So a step's results depend on which stages a plan compiles, but not on the tensors that it stores.


Config = tuple[tuple[str, Any], ...]  # options of Inductor, by name


class NotCompilableError(Exception):
    """Raised if a stage cannot be compiled; the message says why."""


# Source of a leaf of a stage's output: ("made", index among the code's outputs), ("given", index among the code's
# inputs), or ("constant", the leaf itself).
_Output = tuple[Literal["made", "given", "constant"], Any]


class StageCode:
    """Compiled code that equal stages share: its first inputs are the parameters and buffers of the stage that runs."""

    def __init__(self, call: Callable[..., Any], outputs: Sequence[_Output], spec: TreeSpec) -> None:
        self._call = call
        self._outputs = outputs
        self._spec = spec
        # For each stage, dicts that have its parameters and buffers, and their keys. Cached, since a search is slow.
        self._places: WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str]]] = WeakKeyDictionary()

    def run(self, stage: nn.Module, value: Any) -> Any:
        if stage not in self._places:
            slots = {id(tensor): (table, name) for table, name, tensor in owned_slots(stage)}
            self._places[stage] = list(slots.values())
        arguments = [
            *(table[name] for table, name in self._places[stage]),
            *(leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)),
        ]
        del value
        if torch.is_grad_enabled():
            made = self._call(*arguments)
        else:  # detach: AOTAutograd's code gives outputs a grad_fn even under `no_grad`
            made = [each.detach() for each in self._call(*(tensor.detach() for tensor in arguments))]
        sources: dict[str, Any] = {"made": made, "given": arguments}
        leaves = [value if source == "constant" else sources[source][value] for source, value in self._outputs]
        return tree_unflatten(leaves, self._spec)


def owned_slots(stage: nn.Module) -> list[Slot]:
    """Return a triple for each parameter and buffer of `stage`: the dict that has it, its key there, and the tensor."""
    tables = [module._parameters for module in stage.modules()]
    parameters = [(table, name, each) for table in tables for name, each in table.items() if each is not None]
    return [*parameters, *buffer_slots(stage)]


def owned_tensors(stage: nn.Module) -> list[torch.Tensor]:
    return list({id(tensor): tensor for _, _, tensor in owned_slots(stage)}.values())


def compile_code(
    stage: nn.Module,
    value: Any,
    needs_gradient: Sequence[bool],
    config: Config,
    partitioner: CustomPartitionerFn | None = None,
) -> StageCode:
    """Compile `stage` for the shapes, strides and dtypes of `value`, and for the active autocast.

    `needs_gradient` has one entry for each tensor in `value`. The `partitioner`, by default AOTAutograd's, chooses the
    values that the forward saves. Leaves the stage unchanged. Raises NotCompilableError, or any error of the
    partitioner, AOTAutograd or Inductor, if the stage cannot be compiled.
    """
    if partitioner is not None:
        config = (*config, ("custom_partitioner_fn", partitioner))
    owned = owned_tensors(stage)
    leaves, spec = tree_flatten(value)
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for tensor in (*owned, *given):
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise NotCompilableError(f"the stage uses a {type(tensor).__name__} of layout {tensor.layout}")
    flags = [*(tensor.requires_grad for tensor in owned), *needs_gradient]
    function = _TensorFunction(stage, leaves, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's warnings here are not about the user's code
        call = _compile(function, [*owned, *given], flags, config)
    assert function.spec is not None
    return StageCode(call, function.outputs, function.spec)


class _TensorFunction(nn.Module):
    """A stage as a function of tensors: from its parameters, buffers and input tensors to the tensors that it makes.

    Call `note_outputs` once, before the first run: it records in `outputs` and `spec` how the stage's output is made.
    """

    def __init__(self, stage: nn.Module, leaves: list[Any], spec: TreeSpec) -> None:
        super().__init__()
        self._stage = (stage,)  # a tuple hides the stage from nn.Module, since its parameters are passed as inputs
        self._slots = owned_slots(stage)
        self._owned = [id(tensor) for tensor in owned_tensors(stage)]
        # Drop the tensors, since this object lives as long as the code.
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._given = spec
        self._made: list[int] = []
        self.outputs: list[_Output] = []
        self.spec: TreeSpec | None = None

    def note_outputs(self, *tensors: torch.Tensor) -> None:
        """Run the stage, and record where its outputs come from. Raises NotCompilableError if it makes no tensor."""
        # Do not do this while AOTAutograd traces: it wraps tensors anew, so `is` would not find returned inputs.
        returned, self.spec = tree_flatten(self._returned(tensors))
        for position, leaf in enumerate(returned):
            given = next((i for i, tensor in enumerate(tensors) if tensor is leaf), None)
            if given is not None:
                self.outputs.append(("given", given))
            elif isinstance(leaf, torch.Tensor):
                self.outputs.append(("made", len(self._made)))
                self._made.append(position)
            else:
                self.outputs.append(("constant", leaf))
        if not self._made:
            raise NotCompilableError("the stage makes no tensor")

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned, _ = tree_flatten(self._returned(tensors))
        return tuple(returned[position] for position in self._made)

    def as_graph(self) -> fx.GraphModule:
        graph = fx.Graph()
        inputs = [graph.placeholder(f"tensor_{i}") for i in range(len(self._owned) + len(self._positions))]
        made = graph.call_module("stage", tuple(inputs))
        graph.output(tuple(graph.call_function(operator.getitem, (made, i)) for i in range(len(self._made))))
        return fx.GraphModule({"stage": self}, graph)

    def _returned(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        leaves = list(self._leaves)
        count = len(self._owned)
        for position, tensor in zip(self._positions, tensors[count:], strict=True):
            leaves[position] = tensor
        with substituted(self._slots, dict(zip(self._owned, tensors[:count], strict=True))):
            return self._stage[0](tree_unflatten(leaves, self._given))


def _compile(
    function: _TensorFunction, examples: list[torch.Tensor], flags: list[bool], config: Config
) -> Callable[..., Any]:
    # Import Inductor only here: this takes a second, and most plans do not need it.
    from torch.compiler import config as compiler_config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from rotor_py.compile.partitioner import saving_inputs

    # Give the fake mode a ShapeEnv: without one, Inductor does not use its cache on disk.
    mode = torch_compat.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fake = [
        mode.from_tensor(tensor.detach(), static_shapes=True).requires_grad_(flag)
        for tensor, flag in zip(examples, flags, strict=True)
    ]
    with torch.no_grad(), torch_compat.disable_current_modes(), mode:
        function.note_outputs(*fake)
    context = torch_compat.TracingContext(mode)
    tag = getattr(compiler_config, "cache_key_tag", None)  # torch 2.5 has none
    tags = {} if tag is None else {"cache_key_tag": f"{tag} {torch.backends.cpu.get_cpu_capability()}"}
    with (
        torch_compat.disable_current_modes(),  # modes that observe the stage's first run must not see the tracing
        torch_compat.tracing(context),
        torch.enable_grad(),
        # `donated_buffer`: Rule 4. Compile the backward now, not in the first training step. Disable AOTAutograd's
        # cache: its key is the graph of `as_graph`, one call for every stage, so stages would get other stages' code.
        # Leave Inductor's cache on: its key is the traced operators. It lacks the width of the processor's vectors, and
        # code made for narrower ones, as under another ATEN_CPU_CAPABILITY, writes past the ends of its buffers.
        torch_compat.functorch_config.patch(
            donated_buffer=False, force_non_lazy_backward_lowering=True, enable_autograd_cache=False
        ),
        compiler_config.patch(**tags),  # type: ignore[attr-defined]  # torch adds it when imported
    ):
        call = torch_compat.compile_fx(function.as_graph(), fake, config_patches=saving_inputs(dict(config)))
    # PyTorch reads None as "some saved tensors are donated", and would raise an error when a retained graph runs again.
    if context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
    return cast(Callable[..., Any], call)


Compile = bool | str | Mapping[str, Any]  # whether to compile, a mode of `torch.compile`, or Inductor's options


def config_of(given: Compile) -> Config | None:
    """Return Inductor's options for `Checkpointable`'s `compile`; None for False. Raises ValueError or TypeError."""
    if given is False:
        return None
    if not (given is True or isinstance(given, str | Mapping)):
        message = f"compile must be a bool, a mode of torch.compile, or a dict of Inductor's options, got {given!r}"
        raise InvalidTypeError(message, kind="unknown_value", name="compile")
    mode = given if isinstance(given, str) else None
    options = dict(given) if isinstance(given, Mapping) else None
    what = f"compile={given!r}"
    try:
        found: dict[str, Any] = torch_compat.TorchCompileInductorWrapper(mode, options, dynamic=False).config
    except RuntimeError as error:
        raise InvalidValueError(f"{what}: {error}", kind="unknown_value", name="compile") from error
    usual = torch_compat.inductor_config.triton.cudagraphs
    if "triton.cudagraphs" not in found and usual:
        what = "torch._inductor.config.triton.cudagraphs (TORCHINDUCTOR_CUDAGRAPHS)"
    if found.get("triton.cudagraphs", usual):
        message = (
            'take the mode "max-autotune-no-cudagraphs", or the default: '
            f"{what} records CUDA graphs, which permanently hold memory that a plan has to reuse"
        )
        raise InvalidValueError(message, kind="cuda_graphs", name=what)
    return tuple(sorted(found.items()))


# Maps each storage mode of a compiled stage to its budget: a share of the bytes that PyTorch's partitioner saves by
# default. Small budgets also recompute matrix products. A guess: further budgets often lead to the same partitions.
WAYS = {f"within a budget of {budget:.0%}": budget for budget in (0.6, 0.3, 0.1)}
