"""Compile a stage and run its code, in partitions that save different tensors. Check that these compute equal bits."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from rotor_profiling import tensors_in, torch_compat
from rotor_profiling.isolate import buffer_slots, isolated, main_device
from rotor_profiling.stage.stage_signature import HasKind, stage_signature
from rotor_profiling.storage import equal
from rotor_profiling.torch_compat import disable_current_modes, tree_flatten, tree_leaves, tree_unflatten
from rotor_py.compile.stage_code import WAYS, Config, StageCode, compile_code, owned_slots
from rotor_py.errors import InfeasibleError, record_fields
from rotor_py.stage.forward_state import autocast_now, recall_effects, recall_moving, remember_effects, remember_moving
from rotor_py.stage.protocol import Run, StageOffers, offers_of

if TYPE_CHECKING:
    from rotor_profiling.torch_compat import CustomPartitionerFn, TreeSpec

_log = logging.getLogger("rotor_py")
_DEVICES = (torch.device("cpu"), torch.device("cuda"))  # devices whose autocast settings a stage's code depends on
MOST_SHAPES = 8  # largest number of input shapes for which a stage is compiled: TorchDynamo's recompile limit is 8, too


def same_bits(stage: nn.Module, value: Any, needs_gradient: Sequence[bool], one: StageCode, other: StageCode) -> bool:
    """Whether two codes of `stage`, `one` and `other`, compute equal outputs, buffers and gradients."""
    with disable_current_modes():  # dispatch modes that observe the stage's own run must not see these runs
        expected = _results(stage, value, needs_gradient, one)
        found = _results(stage, value, needs_gradient, other)
    return all(equal(*each) for each in zip(found, expected, strict=True))


def _results(
    stage: nn.Module, value: Any, needs_gradient: Sequence[bool], code: StageCode
) -> list[torch.Tensor | None]:
    entered, spec = _as_leaves(value, needs_gradient)
    # Run on copies: the stage may write into its input, which autograd forbids if this is a leaf that needs a gradient.
    copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in entered]
    with isolated(stage, main_device(tensors_in(value))) as parameters, torch.enable_grad():
        made = tensors_in(code.run(stage, tree_unflatten(copies, spec)))
        ends = [tensor for tensor in made if tensor.requires_grad]
        # Draw output gradients after the run: if the two codes drew different amounts of random numbers, these differ.
        arriving = [torch.randn_like(tensor) for tensor in ends]
        wanted = [tensor for tensor in (*tensors_in(entered), *parameters) if tensor.requires_grad]
        gradients = torch.autograd.grad(ends, wanted, arriving, allow_unused=True) if ends and wanted else ()
        return [*(tensor.detach() for tensor in made), *(tensor for _, _, tensor in buffer_slots(stage)), *gradients]


def _as_leaves(value: Any, needs_gradient: Sequence[bool]) -> tuple[list[Any], TreeSpec]:
    """Flatten `value` and detach its tensors. `needs_gradient` has the `requires_grad` to set for each, in order."""
    leaves, spec = tree_flatten(value)
    flags = iter(needs_gradient)
    found = [leaf.detach().requires_grad_(next(flags)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return found, spec


class StageCompiler:
    """Compiles a model's stages with the options `config` of Inductor. Stages that can share code are compiled once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.seconds = 0.0  # seconds spent compiling so far
        self.seconds_of: dict[StageCode, float] = {}  # seconds spent compiling each code
        self._codes: dict[Hashable, StageCode | None] = {}
        self._has_tools = True

    def code(
        self,
        stage: nn.Module,
        name: str,
        value: object,
        needs_gradient: Sequence[bool],
        partitioner: CustomPartitionerFn | None = None,
    ) -> StageCode | None:
        """Return the code for `stage` on inputs like `value`; `needs_gradient` has one entry for each tensor in it.

        The `partitioner`, by default AOTAutograd's, chooses the tensors that the forward saves. Returns None, and logs
        a warning once, if the stage cannot be compiled. Raises InfeasibleError if the partitioner's limit is too small.
        """
        kind = _kind(stage, tree_unflatten(*_as_leaves(value, needs_gradient))), partitioner
        if kind in self._codes or not self._has_tools:
            return self._codes.get(kind)
        began, code = time.perf_counter(), None
        try:
            code = compile_code(stage, value, needs_gradient, self.config, partitioner)
            self.seconds_of[code] = time.perf_counter() - began
        except InfeasibleError:
            raise
        # AOTAutograd, Inductor and the C++ compiler may raise any error. The stage then runs uncompiled.
        except Exception as error:
            exc = torch_compat.inductor_exceptions
            missing = exc.InvalidCxxCompiler, exc.TritonMissing, exc.GPUTooOldForTriton
            self._has_tools = not isinstance(getattr(error, "inner_exception", error), missing)
            name = name if self._has_tools else "the model"
            cause = str(error).strip().partition("\n")[0] or type(error).__name__
            _log.warning("%s is not compiled: %s", name, cause, extra=record_fields("not_compiled", name=name))
        finally:
            self.seconds += time.perf_counter() - began
        self._codes[kind] = code
        return code


def _kind(stage: nn.Module, value: object) -> Hashable:
    """Return a key that is equal for stages that can share compiled code."""
    numbers: dict[int, int] = {}
    shared = tuple(numbers.setdefault(id(tensor), len(numbers)) for _, _, tensor in owned_slots(stage))
    # A signature does not describe modules that a graph calls, so a stage that calls modules shares no code.
    # Children of the plain type nn.Module are not called: they hold sharded parameters.
    graphs = [module for module in stage.modules() if isinstance(module, fx.GraphModule)]
    calls = any(type(child) is not nn.Module for graph in graphs for child in graph.children())
    autocast = tuple((each.device_type, each.enabled, each.dtype) for each in autocast_now(_DEVICES))
    return stage_signature(stage, value), offers_of(stage).wiring, shared, id(stage) if calls else None, autocast


class CompiledStage(nn.Module, StageOffers, HasKind):
    """A stage that compiles `plain` when it first runs, and again for each further input shape, and runs the code.

    The `partitioner`, by default AOTAutograd's, chooses the tensors that the forward saves. Each name in `ways` is a
    further storage mode, whose code saves other tensors: see the Note in `stage_code.py`. If `plain` cannot be
    compiled, it runs uncompiled. If it is to be compiled in pieces, each piece is a stage of this class.

    `name` appears in log messages. Which input tensors need a gradient is declared by `plain`, or else taken from
    `like` (the same stage for other shapes), or else from the input of the first run.
    """

    saves_through_hooks = False  # torch.autograd.graph.saved_tensors_hooks would make PyTorch recompile the code
    ways_are_code = True

    def __init__(
        self,
        plain: nn.Module,
        name: str,
        compiler: StageCompiler,
        *,
        partitioner: CustomPartitionerFn | None = None,
        ways: tuple[str, ...] = (),
        like: CompiledStage | None = None,
    ) -> None:
        super().__init__()
        self._partitioner = partitioner
        self._ways = ways
        self.plain = plain
        self._name = name
        self._compiler = compiler
        # Maps the shapes of an input to a dict from storage modes to codes. Mode None has the code by `partitioner`.
        self._codes: dict[Hashable, dict[str | None, StageCode | None]] = {}
        offers = offers_of(plain)
        self._needs_gradient = offers.needs_gradient
        if self._needs_gradient is None and like is not None:
            self._needs_gradient = like._needs_gradient
        self.carried, self.wiring, self.shared, self.last = offers.carried, offers.wiring, offers.shared, offers.last
        # A list hides the pieces from nn.Module, since their parameters already belong to `plain`.
        self._pieces: list[CompiledStage] = []
        self._in_pieces = offers.in_pieces(self._piece)

    def prepare(self, value: Any) -> bool:
        """Compile for inputs like `value`; return whether this worked. Raises the errors of `StageCompiler.code`."""
        return self._code(value) is not None

    @property
    def compiled(self) -> bool:
        if self._in_pieces is not None:
            return any(piece.compiled for piece in self._pieces)
        return self.code is not None

    @property
    def code(self) -> StageCode | None:
        """The code for the first input shape; None if the stage is not compiled, or is compiled in pieces."""
        return next(iter(self._codes.values()), {}).get(None)

    def with_ways(self, ways: tuple[str, ...]) -> CompiledStage:
        """Return a copy of this stage with AOTAutograd's own partitioner and the further storage modes `ways`."""
        found = CompiledStage(self.plain, self._name, self._compiler, ways=ways, like=self)
        remember_effects(found, recall_effects(self))
        remember_moving(found, recall_moving(self))
        return found

    @property
    def room(self) -> int | None:
        """Bytes that a step may take with the partition chosen by `partitioner`; None if AOTAutograd chose it."""
        return getattr(self._partitioner, "limit", None)

    def like(self, other: nn.Module) -> CompiledStage:
        """Return this stage for other input shapes. `other` is the uncompiled stage for these shapes."""
        return CompiledStage(
            other, self._name, self._compiler, partitioner=self._partitioner, ways=self._ways, like=self
        )

    def forward(self, value: Any) -> Any:
        if self._in_pieces is not None:
            return self._in_pieces(value)
        code = self._code(value)
        return self.plain(value) if code is None else code.run(self.plain, value)

    def ways(self) -> tuple[str, ...]:
        return self._ways

    def ways_for(self, value: Any) -> tuple[str, ...]:
        usual = self._code(value)
        codes = {way: self._code(value, way) for way in self._ways}
        if usual is None or self._needs_gradient is None:
            return ()
        found = []
        for way, code in codes.items():
            if code is None:
                continue
            if same_bits(self.plain, value, self._needs_gradient, usual, code):
                found.append(way)
            else:
                said = "%s is not stored %s: this would change the last digits of its results"
                _log.info(said, self._name, way, extra=record_fields("other_bits", name=self._name))
        return tuple(found)

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        if way not in self._ways:
            return super().forward_by(way, skip_output=skip_output)

        def run(value: Any) -> Any:
            code = self._code(value, way)
            return self(value) if code is None else code.run(self.plain, value)

        return run

    def kind(self, value: Any) -> Hashable:
        return stage_signature(self.plain, value), self._compiler.config, self._partitioner, self._ways

    def gather_begun(self) -> None:
        offers_of(self.plain).gather_begun()

    def _piece(self, piece: nn.Module) -> CompiledStage:
        self._pieces.append(CompiledStage(piece, f"{self._name}, piece {len(self._pieces) + 1}", self._compiler))
        return self._pieces[-1]

    def _code(self, value: Any, way: str | None = None) -> StageCode | None:
        shapes = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in tree_leaves(value)
        )
        if shapes not in self._codes:
            if self._needs_gradient is None:
                # Read `requires_grad` in the first run only: in a later run under `no_grad`, it may be False.
                self._needs_gradient = [tensor.requires_grad for tensor in tensors_in(value)]
            if len(self._codes) == MOST_SHAPES:
                said = "%s has been compiled for %d input shapes, and runs uncompiled for any other shape"
                fields = record_fields("too_many_shapes", name=self._name, shapes=MOST_SHAPES)
                _log.warning(said, self._name, MOST_SHAPES, extra=fields)
            self._codes[shapes] = {} if len(self._codes) < MOST_SHAPES else dict.fromkeys((None, *self._ways))
        codes = self._codes[shapes]
        if way not in codes:
            assert self._needs_gradient is not None
            partitioner = self._partitioner
            if way is not None:
                from rotor_py.compile.partitioner import SharePartitioner  # imported late: it imports Inductor

                partitioner = SharePartitioner(WAYS[way])
            codes[way] = self._compiler.code(self.plain, self._name, value, self._needs_gradient, partitioner)
        return codes[way]
