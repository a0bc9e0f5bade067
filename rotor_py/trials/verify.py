"""Take real training steps, planned and plain, and compare peak, time and gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rotor_cli.facts import Verified
from rotor_profiling import RandomState, measured_peak, tensors_in
from rotor_py import Checkpointable
from rotor_py.trials.operations import Ran, measured_operations
from rotor_solver import Sequence
from rotor_solver.progress import Progress

_TIMED_STEPS = 3


def verify(
    planned: Checkpointable,
    sample: Any,
    loss: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    *,
    fresh_grads: bool,
    others: Iterable[Sequence] = (),
    operations: bool = False,
    progress: Progress | None = None,
) -> list[Verified]:
    """Train with the plan and without it, from the same state; the model is afterwards what it was before.

    What two plain steps differ by is noise; of a captured model, one of them runs the graph that TorchDynamo captures.
    The list goes on with `others`, sequences that are followed instead of the plan. With `operations`, two more steps
    are taken with the plan, for time and memory of each of its operations. `progress` is called with the
    steps that have been compared, all of them, and what the next one is.
    """
    step, others = _Step(planned.model, sample, loss, optimizer, device, fresh_grads), list(others)

    def tell(done: int, what: str) -> None:
        if progress is not None:
            progress(done, 3 + len(others), what)

    tell(0, "a step with the plan")
    first = step.run(planned)
    tell(1, "a plain step")
    plain: tuple[int, float, list[torch.Tensor]] | None = None
    noise = 0.0
    with suppress(torch.OutOfMemoryError):
        found = step.run(planned.model)
        tell(2, "a plain step again")
        again = step.run(torch.compile(planned.model.forward, backend="eager") if planned.captured else planned.model)
        noise, plain = _difference(again[2], found[2]), found

    def verified(run: tuple[int, float, list[torch.Tensor]]) -> Verified:
        peak, seconds, tensors = run
        if plain is None:
            return Verified(peak, seconds, None, None, None)
        return Verified(peak, seconds, _difference(tensors, plain[2]), plain[0], plain[1], noise)

    results = [verified(first)]
    del first
    if operations:
        results[0] = replace(results[0], operations=step.operations(planned))
    with _same_plan_afterwards(planned):
        for number, sequence in enumerate(others):
            tell(3 + number, f"a step with {sequence.algorithm or 'another plan'}")
            planned.sequence = sequence
            results.append(verified(step.run(planned)))
    return results


@contextmanager
def _same_plan_afterwards(planned: Checkpointable) -> Iterator[None]:
    sequence = planned.sequence
    try:
        yield
    finally:
        planned.sequence = sequence


class _Step:
    """A training step that can be taken again from the same state."""

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        loss: Callable[[Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        fresh_grads: bool,
    ) -> None:
        self.model, self.sample, self.loss, self.optimizer = model, sample, loss, optimizer
        self.device, self.fresh_grads = device, fresh_grads

    def run(self, network: Callable[..., Any]) -> tuple[int, float, list[torch.Tensor]]:
        """Measured peak, median seconds of forward, loss and backward, and gradients and buffers after a step."""
        with self._restored():
            self._train(network)  # gradients and optimizer state exist from here on
        with self._restored():
            self._clear()
            peak = measured_peak(lambda: self._train(network), self._present(), self.device)
            results = [tensor.detach().to("cpu", copy=True) for tensor in self._results()]
        times = []
        with self._restored():
            for _ in range(_TIMED_STEPS):
                self._clear()
                times.append(self._forward_backward(network))
        return peak, statistics.median(times), results

    def operations(self, planned: Checkpointable) -> tuple[Ran, ...]:
        """What a step with the plan does, without the optimizer's."""
        assert planned.sequence is not None

        with self._restored():
            self._clear()
            return measured_operations(
                lambda: self._forward_backward(planned),
                planned.sequence,
                planned.names,
                self._present(),
                self.device,
                between=self._clear,
            )

    def _train(self, network: Callable[..., Any]) -> None:
        output = self._call(network)
        value = self.loss(output)
        value.backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def _forward_backward(self, network: Callable[..., Any]) -> float:
        self._synchronize()
        start = time.perf_counter()
        output = self._call(network)  # held to the end, as a training loop does
        self.loss(output).backward()
        self._synchronize()
        return time.perf_counter() - start

    def _call(self, network: Callable[..., Any]) -> Any:
        if isinstance(self.sample, dict):
            return network(**self.sample)
        return network(*self.sample) if isinstance(self.sample, tuple) else network(self.sample)

    def _clear(self) -> None:
        self.model.zero_grad(set_to_none=self.fresh_grads)

    def _results(self) -> list[torch.Tensor]:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [*gradients, *self.model.buffers()]

    def _present(self) -> list[torch.Tensor]:
        state = tensors_in([list(entry.values()) for entry in self.optimizer.state.values()]) if self.optimizer else []
        return [*self.model.parameters(), *self._results(), *state, *tensors_in(self.sample)]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Put parameters, buffers and the random state back."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        saved = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        state = RandomState.now((self.device,))
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, saved, strict=True):
                    tensor.copy_(before)
            state.restore()


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest absolute difference; infinite where tensors are missing or not a number on one side only."""
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and _same(a, b)):
            continue
        distance = (a.double() - b.double()).abs().max().item()
        worst = max(worst, distance if distance == distance else float("inf"))
    return worst


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())
