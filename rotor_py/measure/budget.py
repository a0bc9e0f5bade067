"""How a limit for the whole step is divided: what is fixed, and what is left for the chain."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from rotor_profiling import OptimizerCost
from rotor_py.measure.fixed_memory import FixedMemory, count_fixed_memory, kept_gradient_bytes, trained_bytes
from rotor_py.measure.measurement import Measurement
from rotor_py.units import format_bytes, limit_text
from rotor_solver import (
    Algorithm,
    Backward,
    Chain,
    InfeasibleError,
    Loss,
    Persistent,
    Sequence,
    StoreAll,
    min_bytes,
    simulate,
    store_all,
)


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of a step around the chain.

    Beside the fixed part, `before_bytes` are there while the layers before the chain run, and `stepping_bytes` while
    the optimizer steps: the chain's input, its output, and fresh gradients. The step itself needs `step_bytes` more;
    None if nothing is known about the optimizer. `snapshot_bytes` are needed as soon as anything is computed twice.
    """

    fixed: FixedMemory
    chain: Chain
    before_bytes: int = 0
    snapshot_bytes: int = 0
    stepping_bytes: int = 0
    step_bytes: int | None = None

    def with_optimizer(self, cost: OptimizerCost) -> Budget:
        """The same budget, now that the optimizer is known."""
        return replace(self, fixed=replace(self.fixed, optimizer=cost.state_bytes), step_bytes=cost.step_bytes)

    @property
    def floor_bytes(self) -> int:
        """What the step needs whatever the plan is: for the layers before the chain, or for the optimizer."""
        return max(self.fixed.total + self.before_bytes, self.optimizer_peak_bytes)

    @property
    def optimizer_peak_bytes(self) -> int:
        """What is in memory while the optimizer steps, as far as the optimizer is known."""
        return self.fixed.total + self.stepping_bytes + (self.step_bytes or 0)

    def peak_bytes(self, sequence: Sequence) -> int:
        """The predicted peak of a whole step that follows `sequence`."""
        return max(self.floor_bytes, self.beside_chain(sequence) + simulate(self.chain, sequence).peak)

    def beside_chain(self, sequence: Sequence) -> int:
        """What is in memory beside the chain while it follows `sequence`: the fixed part, and the snapshots."""
        return self.fixed.total + (self.snapshot_bytes if recomputes(sequence) else 0)

    def chain_limit(self, mem_limit: int) -> int:
        """What is left for the chain, its input included, if something is computed twice."""
        return mem_limit - self.fixed.total - self.snapshot_bytes

    def least_bytes(self) -> int:
        """The least limit for which there is a plan."""
        # Storing all may need least: it needs no snapshots, and recomputing may save less than they take.
        stored = self.peak_bytes(store_all(self.chain))
        return min(stored, max(self.floor_bytes, self.fixed.total + self.snapshot_bytes + min_bytes(self.chain)))

    def solve(self, mem_limit: int, algorithm: Algorithm) -> Sequence:
        """A sequence for a whole step within `mem_limit` bytes.

        Raises InfeasibleError if nothing fits, with the least limit that works as `min_bytes`, and ValueError if
        `algorithm` cannot solve this chain.
        """
        stored = store_all(self.chain)
        # Storing all needs no snapshots. It may fit into the limit although it does not fit into `chain_limit`, which
        # leaves room for them. Other algorithms are asked in any case: their sequence is wanted, not the fastest.
        if isinstance(algorithm, Persistent) and self.peak_bytes(stored) <= mem_limit:
            return StoreAll().solve(self.chain, mem_limit)
        if mem_limit < self.least_bytes():
            raise self.refuse(mem_limit)
        sequence = algorithm.solve(self.chain, self.chain_limit(mem_limit))
        assert self.peak_bytes(sequence) <= mem_limit
        return sequence

    def refuse(self, mem_limit: int) -> InfeasibleError:
        """The error for a limit that is too small, in bytes of the whole step.

        Its words are those by which accelerate's `find_executable_batch_size` knows that a batch was too large.
        """
        least = self.least_bytes()
        largest = max(range(len(self.chain.stages)), key=lambda i: self.chain.stages[i].options[0].saved, default=None)
        needs = ""
        if largest is not None:
            stage = self.chain.stages[largest]
            needs = f" Stage {stage.name} alone keeps {format_bytes(stage.options[0].saved)} for its backward."
        if self.fixed.gradients:
            needs += " If gradients are freed between steps, say so: fresh_grads=True (--fresh-grads)."
        message = (
            f"a training step needs at least {format_bytes(least)} ({least} bytes), of which {self.split()}; the limit "
            f"is {format_bytes(mem_limit)} ({mem_limit} bytes), so it would run out of memory.{needs} Try a smaller "
            f"batch, or a limit of {limit_text(least)}."
        )
        return InfeasibleError(message, min_bytes=least, mem_limit=mem_limit, stage=largest)

    def with_communication(self, size: int) -> Budget:
        """The same budget with `size` bytes for communication between processes."""
        return replace(self, fixed=replace(self.fixed, communication=size))

    def with_gradients_of(self, model: nn.Module, device: torch.device, *, fresh: bool) -> Budget:
        """The same budget, with room for all gradients that are there now."""
        gradients = max(self.fixed.gradients, kept_gradient_bytes(model, device, fresh=fresh))
        return replace(self, fixed=replace(self.fixed, gradients=gradients))

    def with_found(self, measurement: Measurement, more_bytes: int, *, fresh_gradients: bool) -> Budget:
        """The same budget, now that `measurement` says more of the chain, and `more_bytes` are held all the time."""
        chain = measurement.chain(fresh_gradients=fresh_gradients)
        return replace(self, chain=chain, fixed=replace(self.fixed, other=self.fixed.other + more_bytes))

    def split(self) -> str:
        """The fixed part in words."""
        parts = self.parts()
        return f"{format_bytes(self.fixed.total)} is fixed" + (f" ({parts})" if parts else "")

    def parts(self) -> str:
        """What the fixed part consists of, in words."""
        return self.fixed.in_words()


def recomputes(sequence: Sequence) -> bool:
    """Whether a forward runs after the loss."""
    operations = list(sequence)
    return any(not isinstance(operation, Backward) for operation in operations[operations.index(Loss()) + 1 :])


def make_budget(
    model: nn.Module,
    sample: object,
    measurement: Measurement,
    device: torch.device,
    *,
    fresh_gradients: bool,
    optimizer: OptimizerCost | None,
    communication: int = 0,
    buckets: bool = False,
) -> Budget:
    """The budget of a step of `model` on `sample`; `optimizer` is None where nothing is known about it.

    `buckets` says that `communication` is on the device already, as DistributedDataParallel's buckets are.
    """
    fixed = count_fixed_memory(
        model,
        sample,
        measurement,
        device,
        fresh_gradients=fresh_gradients,
        optimizer=optimizer,
        communication=communication,
        buckets=buckets,
    )
    # The caller holds the batch and the output until the step ends, the optimizer's part included.
    prefix = measurement.prefix
    output_bytes = measurement.stages[-1].activation_bytes + measurement.held_bytes
    fresh = trained_bytes(model, device) if fresh_gradients else 0
    return Budget(
        fixed=fixed,
        chain=measurement.chain(fresh_gradients=fresh_gradients),
        before_bytes=measurement.input_bytes + (prefix.temp_bytes if prefix else 0),
        snapshot_bytes=measurement.snapshot_bytes,
        stepping_bytes=measurement.input_bytes + output_bytes + fresh,
        step_bytes=optimizer.step_bytes if optimizer else None,
    )
