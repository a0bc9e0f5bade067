"""`with rotor_py.memory_budget("4GB"): model = torch.compile(model)`."""

from __future__ import annotations

import threading
import warnings
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

import torch

from rotor_py.errors import DescribedWarning, InvalidValueError
from rotor_py.units import parse_bytes

if TYPE_CHECKING:
    from rotor_py.partition.partitioner import BudgetPartitioner

# torch is asked for its backends only when something is compiled: importing them takes a second.


class memory_budget:  # noqa: N801  (a context manager that reads as a function, as torch.no_grad does)
    """What `torch.compile` is called on inside this block trains within `limit`.

    `limit` is the peak of a training step of each compiled graph on its device, as bytes (an int) or as a text such as
    "4GB" or "80%" of the device: parameters, buffers, inputs, saved activations, values in between, outputs and
    gradients. The loss and the optimizer outside the graph, and gradients kept from earlier steps, are not counted.
    Operators run one by one, as under aot_eager, keep to it. What Inductor makes of a graph is watched in the first
    step, and compiled again if it takes more; if nothing helps, a warning says so. Within the limit, the graph's
    backward runs again what costs least time. Numbers stay those of the graph that saves all.

    The budget belongs to what is compiled: it stays when the block is left, also when the graph is compiled again for
    another shape. Models that were compiled before keep what they have. `options` says the same without a block:

        torch.compile(model, options=rotor_py.memory_budget("4GB").options)

    Raises ValueError for a limit that cannot be read; inside, torch.compile raises it for backends without AOTAutograd.
    The first call of a compiled model raises InfeasibleError, inside torch's BackendCompilerFailed, if nothing fits.
    """

    def __init__(self, limit: int | str) -> None:
        parse_bytes(limit, device_bytes=1)  # what it is on the device is known when a graph is compiled
        self.limit = limit
        self.compiled = 0
        """How often `torch.compile` has been called inside."""
        self._tokens: list[Token[memory_budget | None]] = []

    @property
    def options(self) -> dict[str, Any]:
        """Options of `torch.compile` for the backend inductor."""
        from rotor_py.compiled.saved_inputs import saving_inputs

        return saving_inputs({"custom_partitioner_fn": self._partitioner()})

    def _partitioner(self) -> BudgetPartitioner:
        from rotor_py.partition.partitioner import BudgetPartitioner

        return BudgetPartitioner(self.limit, fused=True)

    def __enter__(self) -> memory_budget:
        self._tokens.append(_current.set(self))
        _hook.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _hook.release()
        _current.reset(self._tokens.pop())
        if kind is None and not self.compiled:
            warnings.warn(
                DescribedWarning(
                    f"torch.compile was not called inside memory_budget({self.limit!r}), so the budget applies to "
                    "nothing; call torch.compile(model) inside the block. What was compiled before keeps its own "
                    "budget.",
                    kind="budget_unused",
                ),
                stacklevel=2,
            )

    def bound(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `torch.compile` with this budget. Raises ValueError for a backend that cannot keep it."""
        from torch._dynamo.backends import registry

        self.compiled += 1
        default = getattr(registry, "get_default_backend", lambda: "inductor")  # torch 2.11 has no other one
        backend = settings.get("backend") or default()
        if backend == "inductor":
            return self._bound_inductor({**settings, "backend": backend})
        return {**settings, "backend": self._bound_backend(backend)}

    def _bound_inductor(self, settings: dict[str, Any]) -> dict[str, Any]:
        mode, options = settings.get("mode"), settings.get("options")
        if mode is not None and options is not None:
            return settings  # torch.compile refuses that
        if mode is not None:
            # Options go with no mode, so the mode is spelt out.
            options = torch._inductor.list_mode_options(mode, settings.get("dynamic"))
        options = dict(options or {})
        partitioner = self._partitioner()
        if options.get("custom_partitioner_fn", partitioner) != partitioner:
            raise InvalidValueError(
                "options have a custom_partitioner_fn, and memory_budget brings its own; leave one of the two out",
                kind="excluded_together",
                name="custom_partitioner_fn",
            )
        from rotor_py.compiled.saved_inputs import saving_inputs
        from rotor_py.partition.watched_inductor import WatchedInductor

        options = saving_inputs({**options, "custom_partitioner_fn": partitioner})
        backend = WatchedInductor(options, settings.get("dynamic"), partitioner)
        return {**settings, "backend": backend, "mode": None, "options": None}

    def _bound_backend(self, backend: Any) -> Any:
        from torch._dynamo.backends.common import AotAutograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._dynamo.backends.registry import lookup_backend

        from rotor_py.partition.partitioner import BudgetPartitioner

        partition = BudgetPartitioner(self.limit)
        if backend == "aot_eager":  # a function around such an object, made anew for every graph
            return AotAutograd(
                fw_compiler=boxed_nop,
                bw_compiler=boxed_nop,
                partition_fn=partition,
                keep_inference_input_mutations=True,
            )
        found = lookup_backend(backend) if isinstance(backend, str) else backend
        if isinstance(found, AotAutograd):
            return AotAutograd(**{**found.kwargs, "partition_fn": partition})
        raise InvalidValueError(
            f"backend {backend!r} does not partition graphs by AOTAutograd, so a memory budget cannot be kept; use "
            "inductor, aot_eager or a backend made by torch._dynamo.backends.common.aot_autograd, or leave the block",
            kind="unsupported_backend",
            name=str(backend),
        )


_current: ContextVar[memory_budget | None] = ContextVar("memory_budget", default=None)


class _Hook:
    """Stands in for `torch.compile` as long as some thread is inside a block; other threads are passed on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._plain: Any = None

    def acquire(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._plain, torch.compile = torch.compile, self._compile
            self._inside += 1

    def release(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.compile = self._plain

    def _compile(self, model: Any = None, **settings: Any) -> Any:
        budget = _current.get()
        if budget is not None and not settings.get("disable"):
            settings = budget.bound(settings)
        return self._plain(model, **settings)


_hook = _Hook()
