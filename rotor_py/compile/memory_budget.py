"""Train compiled graphs in a memory budget: `with rotor_py.memory_budget("4GB"): model = torch.compile(model)`."""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from rotor_profiling import storage_bytes, tensors_in, torch_compat
from rotor_profiling.isolate import Replaced, main_device
from rotor_profiling.step import StepWatch, watch_step
from rotor_profiling.torch_compat import CompileContext, TracingContext, compile_context, functorch_config, tracing
from rotor_py.compile.partitioner import BudgetPartitioner, saving_inputs
from rotor_py.errors import DescribedWarning, InvalidValueError, record_fields
from rotor_py.measure.device import limit_bytes
from rotor_py.units import exact_bytes, limit_text, parse_bytes

_log = logging.getLogger("rotor_py")
# Number of operators that Inductor may fuse into one kernel when it recompiles a graph to need less memory; its default
# is 64. A guess: a step of three Llama blocks then took 5.7 MB instead of 6.7 MB, and 5.9 MB were predicted.
_FUSION = 4

Call = Callable[..., Any]


class GraphWatch:
    """Measure the peak memory of one training step of a graph, from this object's creation to the end of the backward.

    The peak includes `held_bytes`, the bytes of the graph's inputs and parameters, and gradients of the outputs, but
    not what the caller allocates otherwise between forward and backward.
    """

    def __init__(self, watch: StepWatch, held_bytes: int) -> None:
        # The step's peak in bytes; None until the step ends, or if it could not be measured.
        self.peak: int | None = None
        self._held_bytes = held_bytes
        self.watch = watch
        self._gradients: list[torch.Tensor] = []
        # A set that lives as long as the step: until the backward begins, hooks hold it, and then autograd's engine.
        self._token: weakref.ref[set[Any]] | None = None

    @property
    def in_flight(self) -> bool:
        return self._token is not None and self._token() is not None

    def forward_returned(self, outputs: list[torch.Tensor]) -> None:
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        if not trained:
            self.watch.stop()
            return
        self.watch.mark("between")
        token = set[Any]()
        # The step ends when nothing holds the token any more: after the backward, or once the caller drops the outputs.
        weakref.finalize(token, self._over).atexit = False
        self._token = weakref.ref(token)
        owned = [token]
        for tensor in trained:
            tensor.register_hook(partial(self._gradient_arrived, owned))

    def _gradient_arrived(self, owned: list[set[Any]], gradient: torch.Tensor) -> None:
        self._gradients.append(gradient)
        if owned:
            # The watch cannot be stopped inside a backward. This callback has the token as its argument, and autograd
            # frees both when the backward ends: then `_over` stops the watch.
            torch_compat.queue_callback(partial(id, owned.pop()))
            self.watch.mark("backward")

    def _over(self) -> None:
        phases, gradients = self.watch.stop(), storage_bytes(self._gradients)
        self._gradients.clear()
        if phases is None or "backward" not in phases:
            return
        forward, backward = phases[""], phases["backward"]
        self.peak = self._held_bytes + max(forward.rise, forward.kept + gradients + backward.rise)


# Inductor fuses operators and allocates buffers, so the peak of its code is known only after a run. If the first step
# exceeds the budget, the graph is recompiled before the second step: with smaller kernels, since large ones hold values
# of several layers at once, and for a smaller budget. Later steps run whichever of the two codes has the smaller peak.


class WatchedInductor(torch_compat.TorchCompileInductorWrapper):
    """The backend inductor of `torch.compile` with `options` and a `partitioner`; each graph is a `WatchedGraph`."""

    def __init__(self, options: dict[str, Any], dynamic: bool | None, partitioner: BudgetPartitioner) -> None:
        super().__init__(None, options, dynamic)  # type: ignore[no-untyped-call] # torch leaves it so
        self._partitioner = partitioner

    def __call__(
        self, model_: fx.GraphModule, inputs_: list[Any], *, config_patches: dict[str, Any] | None = None
    ) -> Call:
        # Copy the graph, since compiling rewrites it. This copies no parameters, which are inputs of the graph.
        graph = copy.deepcopy(model_)
        tracing_now, compiling_now = TracingContext.try_get(), CompileContext.try_get()

        def compiled(partitioner: BudgetPartitioner, *, narrow: bool) -> Call:
            """Compile the graph, now or later, in TorchDynamo's context of now. `narrow`: fuse less into a kernel."""
            patches = {**self.config, **(config_patches or {}), "custom_partitioner_fn": partitioner}
            if narrow:
                usual = torch_compat.inductor_config.max_fusion_size
                patches["max_fusion_size"] = min(_FUSION, patches.get("max_fusion_size", usual))
            with ExitStack() as around:
                if TracingContext.try_get() is None:
                    around.enter_context(tracing(tracing_now))
                    around.enter_context(compile_context(compiling_now))
                # Compile the backward now: compiled during a step, it would add to the measured peak.
                around.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
                return cast(Call, torch_compat.compile_fx(copy.deepcopy(graph), inputs_, config_patches=patches))

        return WatchedGraph(compiled, self._partitioner)


class WatchedGraph:
    """The code of one graph. Measures a training step; if it exceeds the budget, recompiles and measures again."""

    def __init__(self, compilation: Callable[..., Call], partitioner: BudgetPartitioner) -> None:
        self._compile: Callable[..., Call] | None = compilation
        self._partitioner = partitioner.for_one_graph(0)
        self._call = compilation(self._partitioner, narrow=False)
        self._first: tuple[int, Call] | None = None  # peak in bytes of the first code, and the code, if over the budget
        self._watch: GraphWatch | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._watch is not None and self._watch.peak is not None:
            self._account_for(self._watch.peak, main_device(tensors_in(arguments)))
        if self._compile is None or not torch.is_grad_enabled():
            return self._call(*arguments)
        if self._watch is not None and self._watch.in_flight:
            self._watch.watch.stop()  # its backward has not run yet, so the peak would be that of two steps
            return self._call(*arguments)
        step = watch_step(main_device(tensors_in(arguments)), 0, 0)
        if step is None:
            return self._call(*arguments)
        self._watch = GraphWatch(step, storage_bytes(tensors_in(arguments)))
        try:
            made = self._call(*arguments)
        except BaseException:
            self._watch.watch.stop()
            raise
        self._watch.forward_returned(tensors_in(made))
        return made

    def _account_for(self, peak: int, device: torch.device) -> None:
        limit = limit_bytes(self._partitioner.limit, device)
        self._watch = None
        sizes = exact_bytes(peak), exact_bytes(limit)
        if peak > limit and self._first is None:
            said = "recompiling a graph to need less memory: a step of Inductor's code takes %s, and its budget is %s"
            _log.info(said, *sizes, extra=record_fields("compiled_again", peak_bytes=peak, mem_limit=limit))
            # Reserve the bytes by which the step exceeded its predicted peak. If the code came from torch's cache on
            # disk, this prediction is unknown: then reserve the bytes by which the step exceeded the limit.
            weight = self._partitioner.weight
            self._first = peak, self._call
            self._partitioner = self._partitioner.for_one_graph(max(peak - (weight.peak if weight else limit), 1))
            assert self._compile is not None
            self._call = self._compile(self._partitioner, narrow=True)
            return
        if peak > limit and self._first is not None:
            if self._first[0] <= peak:
                peak, self._call = self._first
            _log.warning(
                "take a budget of %s or more, or a smaller batch: a step of Inductor's code for a graph takes %s, even "
                "when recompiled to need less, and its memory budget is %s",
                limit_text(peak), *sizes,
                extra=record_fields("graph_over_budget", peak_bytes=peak, mem_limit=limit),
            )  # fmt: skip
        self._compile = self._first = None  # the decision is final: free the graph and the code that lost


class memory_budget:  # noqa: N801  (a context manager that reads as a function, as torch.no_grad does)
    """Keep training steps of models that `torch.compile` compiles inside this block within `limit`.

    `limit` is the peak memory of a training step of each compiled graph on its device: bytes (an int) or a text such as
    "4GB" or "80%" of the device. It covers parameters, buffers, inputs, saved activations, temporaries, outputs and
    gradients, but not the loss and the optimizer outside the graph, nor gradients held from earlier steps.

    Under aot_eager and other backends that run operators one by one, steps stay within the limit, except for scratch
    memory of custom operators, which is not measured. Inductor's code is measured in its first step, and recompiled if
    it exceeds the limit; if it still does, a warning is logged. To fit, the backward recomputes some values. Results
    are those of a step that saves all values (with Inductor, up to rounding).

    The budget belongs to the compiled model: it applies after the block, too, and when the graph is recompiled for
    another shape. Models that were compiled before the block are not affected. `options` does the same without a block:

        torch.compile(model, options=rotor_py.memory_budget("4GB").options)

    Raises ValueError for an invalid limit. In the block, torch.compile raises ValueError for backends without
    AOTAutograd. If no partition fits, a model's first call raises InfeasibleError inside BackendCompilerFailed.
    """

    def __init__(self, limit: int | str) -> None:
        parse_bytes(limit, device_bytes=1)  # only to check the text: the device is known when a graph is compiled
        self.limit = limit
        self.compiled = 0
        """Number of calls of `torch.compile` inside the block."""
        self._tokens: list[Token[memory_budget | None]] = []

    @property
    def options(self) -> dict[str, Any]:
        """Options of `torch.compile` for the backend inductor."""
        return saving_inputs({"custom_partitioner_fn": BudgetPartitioner(self.limit, fused=True)})

    def __enter__(self) -> memory_budget:
        self._tokens.append(_current.set(self))
        _replaced.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _replaced.__exit__()
        _current.reset(self._tokens.pop())
        if kind is None and not self.compiled:
            said = f"call torch.compile inside memory_budget({self.limit!r}): it does not affect models compiled before"
            warnings.warn(DescribedWarning(said, kind="budget_unused"), stacklevel=2)

    def bound(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Add this budget to `settings` of `torch.compile`. Raises ValueError for a backend that cannot use it."""
        self.compiled += 1
        registry = torch_compat.dynamo_registry
        default = getattr(registry, "get_default_backend", lambda: "inductor")  # torch 2.11 lacks this function
        backend = settings.get("backend") or default()
        if backend != "inductor":
            return {**settings, "backend": self._bound_backend(backend)}
        mode, options = settings.get("mode"), settings.get("options")
        if mode is not None and options is not None:
            return {**settings, "backend": backend}  # torch.compile raises an error for a mode together with options
        if mode is not None:
            options = torch_compat.list_mode_options(mode, settings.get("dynamic"))
        options = dict(options or {})
        partitioner = BudgetPartitioner(self.limit, fused=True)
        if options.get("custom_partitioner_fn", partitioner) != partitioner:
            message = "leave out custom_partitioner_fn in options, or memory_budget, which sets this option itself"
            raise InvalidValueError(message, kind="excluded_together", name="custom_partitioner_fn")
        options = saving_inputs({**options, "custom_partitioner_fn": partitioner})
        watched = WatchedInductor(options, settings.get("dynamic"), partitioner)
        return {**settings, "backend": watched, "mode": None, "options": None}

    def _bound_backend(self, backend: Any) -> Any:
        partition = BudgetPartitioner(self.limit)
        if backend == "aot_eager":  # not an AotAutograd, but a function that makes one for every graph
            return torch_compat.AotAutograd(
                fw_compiler=torch_compat.boxed_nop,
                bw_compiler=torch_compat.boxed_nop,
                partition_fn=partition,
                keep_inference_input_mutations=True,
            )
        found = torch_compat.lookup_backend(backend) if isinstance(backend, str) else backend
        if isinstance(found, torch_compat.AotAutograd):
            return torch_compat.AotAutograd(**{**found.kwargs, "partition_fn": partition})
        message = (
            "use the backend inductor, aot_eager or one of torch._dynamo.backends.common.aot_autograd: a memory budget "
            f"needs a backend that partitions graphs with AOTAutograd, and {backend!r} does not"
        )
        raise InvalidValueError(message, kind="unsupported_backend", name=str(backend))


_current: ContextVar[memory_budget | None] = ContextVar("rotor_py.memory_budget", default=None)


def _compile(model: Any = None, **settings: Any) -> Any:
    budget = _current.get()  # None if this thread is in no `memory_budget` block
    if budget is not None and not settings.get("disable"):
        settings = budget.bound(settings)
    ((_, _, plain),) = _replaced.originals
    return plain(model, **settings)


_replaced = Replaced(lambda: [(torch, "compile", _compile)])
