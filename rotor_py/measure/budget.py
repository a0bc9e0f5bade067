"""How a limit for the whole step is split: what is fixed, and what is left for the chain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from rotor_profiling import OptimizerCost, bytes_like, storage_bytes, storages, tensors_in
from rotor_py.measure.device import allocated_bytes
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
class FixedMemory:
    """Bytes on the device that every plan has to live with, from the beginning of the step to its end.

    `communication` is what gradients are sent in, and sharded parameters gathered. `batch` counts what the caller
    passes in where layers run before the chain; otherwise it is the chain's a_0. `other` is what else this process
    holds on the device.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    communication: int = 0
    batch: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of a step around the chain.

    Beside the fixed part there are `before_bytes` while the layers before the chain run, and while the optimizer steps
    `stepping_bytes` (the chain's input, its output, fresh gradients) and `step_bytes`, which its step needs; None where
    nothing is known about the optimizer. `snapshot_bytes` are needed as soon as anything is computed twice.
    """

    fixed: FixedMemory
    chain: Chain
    before_bytes: int = 0
    snapshot_bytes: int = 0
    stepping_bytes: int = 0
    step_bytes: int | None = None

    def with_optimizer(self, cost: OptimizerCost) -> Budget:
        """The same with an optimizer that nothing was known about."""
        return replace(self, fixed=replace(self.fixed, optimizer=cost.state_bytes), step_bytes=cost.step_bytes)

    @property
    def floor_bytes(self) -> int:
        """What the parts of the step need in which the plan has no say: layers before the chain, and the optimizer."""
        return max(self.fixed.total + self.before_bytes, self.optimizer_peak_bytes)

    @property
    def optimizer_peak_bytes(self) -> int:
        """What is in memory while the optimizer steps, as far as it is known."""
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
        stored = self.peak_bytes(store_all(self.chain))
        return min(stored, max(self.floor_bytes, self.fixed.total + self.snapshot_bytes + min_bytes(self.chain)))

    def solve(self, mem_limit: int, algorithm: Algorithm) -> Sequence:
        """A sequence for a whole step within `mem_limit` bytes; InfeasibleError if nothing fits."""
        stored = store_all(self.chain)
        if isinstance(algorithm, Persistent) and self.peak_bytes(stored) <= mem_limit:
            return StoreAll().solve(self.chain, mem_limit)
        if mem_limit < self.least_bytes():
            raise self.refuse(mem_limit)
        sequence = algorithm.solve(self.chain, self.chain_limit(mem_limit))
        assert self.peak_bytes(sequence) <= mem_limit
        return sequence

    def refuse(self, mem_limit: int) -> InfeasibleError:
        """The error for a limit that is too small, in terms of the whole step."""
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
            f"is {format_bytes(mem_limit)} ({mem_limit} bytes).{needs} Try a smaller batch, or a limit of "
            f"{limit_text(least)}."
        )
        return InfeasibleError(message, min_bytes=least, mem_limit=mem_limit, stage=largest)

    def with_communication(self, size: int) -> Budget:
        """The same with `size` bytes for what processes send to each other."""
        return replace(self, fixed=replace(self.fixed, communication=size))

    def with_gradients_of(self, model: nn.Module, device: torch.device, *, fresh: bool) -> Budget:
        """The same with room for the gradients that there are now, if it has not enough."""
        gradients = max(self.fixed.gradients, _gradients(model, device, fresh))
        return replace(self, fixed=replace(self.fixed, gradients=gradients))

    def split(self) -> str:
        """The fixed part in words."""
        parts = self.parts()
        return f"{format_bytes(self.fixed.total)} is fixed" + (f" ({parts})" if parts else "")

    def parts(self) -> str:
        """What the fixed part consists of, in words."""
        parts = [
            f"{format_bytes(size)} {name}"
            for name, size in (
                ("parameters", self.fixed.parameters),
                ("buffers", self.fixed.buffers),
                ("gradients", self.fixed.gradients),
                ("optimizer state", self.fixed.optimizer),
                ("communication", self.fixed.communication),
                ("batch", self.fixed.batch),
                ("other", self.fixed.other),
            )
            if size
        ]
        return ", ".join(parts)


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

    Of `communication`, DistributedDataParallel has its `buckets` on the device from the beginning.
    """
    chain = measurement.chain(fresh_gradients=fresh_gradients)
    parameters = list(model.parameters())
    trained = bytes_like(p for p in parameters if p.requires_grad and p.device == device)
    here = _on(device, parameters)
    sizes = storages(here)
    buffers = storage_bytes(_on(device, model.buffers()), owned_elsewhere=sizes)
    batch = storage_bytes(_on(device, tensors_in(sample)))
    gradients = _gradients(model, device, fresh_gradients)
    state = optimizer.state_bytes if optimizer else 0
    accounted = sum(sizes.values()) + buffers + batch + (communication if buckets else 0)
    prefix = measurement.prefix
    fixed = FixedMemory(
        parameters=sum(sizes.values()),
        buffers=buffers,
        gradients=gradients,
        optimizer=state,
        communication=communication,
        batch=batch if prefix else 0,
        other=measurement.loss.kept_bytes
        + measurement.returned_bytes
        + _other(device, parameters, accounted, optimizer),
    )
    output_bytes = measurement.stages[-1].activation_bytes + measurement.held_bytes
    stepping = measurement.input_bytes + output_bytes + (trained if fresh_gradients else 0)
    return Budget(
        fixed=fixed,
        chain=chain,
        before_bytes=measurement.input_bytes + (prefix.temp_bytes if prefix else 0),
        snapshot_bytes=measurement.snapshot_bytes,
        stepping_bytes=stepping,
        step_bytes=optimizer.step_bytes if optimizer else None,
    )


def _gradients(model: nn.Module, device: torch.device, fresh: bool) -> int:
    """Bytes of gradients that are there throughout: those left over of frozen parameters, and unless `fresh`, all."""
    frozen = [p.grad for p in model.parameters() if p.grad is not None and not p.requires_grad]
    trained = bytes_like(p for p in model.parameters() if p.requires_grad and p.device == device)
    return storage_bytes(_on(device, frozen)) + (0 if fresh else trained)


def _on(device: torch.device, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.device == device]


def _other(
    device: torch.device, parameters: list[nn.Parameter], accounted: int, optimizer: OptimizerCost | None
) -> int:
    """What the process holds on the device beyond what is accounted for; unknown, and so nothing, on the CPU."""
    allocated = allocated_bytes(device)
    if allocated is None:
        return 0
    present = storage_bytes(_on(device, [p.grad for p in parameters if p.grad is not None]))
    state = optimizer.present_bytes if optimizer else 0
    return max(0, allocated - accounted - present - state)
