"""Take training steps on fake tensors, to predict the bytes that CUDA's caching allocator reserves for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rotor_profiling import tensors_in
from rotor_profiling.backends import operators
from rotor_profiling.followed_storages import FollowedStorages
from rotor_profiling.isolate import set_meanwhile, undoing
from rotor_profiling.optimizer import stepping_as_on_cuda
from rotor_profiling.stage.gradients import scalar_after
from rotor_profiling.storage import local
from rotor_py.checkpointable import Checkpointable
from rotor_py.data_sheet import WORKSPACES, Device, Reservation, workspace_bytes
from rotor_py.estimation.caching_allocator import (
    LARGE_SEGMENT,
    Allocate,
    DeviceFullError,
    Event,
    Free,
    most_bytes,
    replay,
)
from rotor_py.estimation.cuda_autocast import region
from rotor_py.estimation.roofline import scratch_bytes
from rotor_py.measure.device import limit_bytes
from rotor_py.plan.planned_model import plan_of
from rotor_py.plan.step_spec import arguments_of
from rotor_py.validate.steps import tensors_before_step
from rotor_solver import InfeasibleError


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A training step of `network` on the input `value`. A call takes the step, holding its outputs to the end.

    Without a `loss`, the loss is the output's first scalar that requires a gradient, or else a scalar computed from all
    output tensors. A step runs as many forwards before its first backward as were planned. With `fresh_grads`, it frees
    gradients at its end. Forwards and losses, not backwards, run under autocast with the dtype `autocast`.
    """

    network: Checkpointable
    value: Any
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    fresh_grads: bool = False
    autocast: torch.dtype | None = None

    def __call__(self) -> None:
        network, budget = self.network, self.network.budget
        arguments, keywords = arguments_of(self.value, network.model)
        outputs, values = [], []
        with region(self.autocast):
            for _ in range(1 if budget is None else budget.forwards):
                outputs.append(network(*arguments, **keywords))
                values.append(_loss_in(outputs[-1]) if self.loss is None else self.loss(outputs[-1]))
        with operators():  # not around the forward, where TorchDynamo would capture the replaced operators
            while values:
                last = budget is not None and budget.backward_order == "reverse"
                values.pop(-1 if last else 0).backward()
        self._step_optimizer()

    def _step_optimizer(self) -> None:
        if self.optimizer is not None:
            with stepping_as_on_cuda(self.optimizer):
                self.optimizer.step()
        if self.fresh_grads:
            self.network.zero_grad()

    def prepare(self) -> None:
        """Step the optimizer with arbitrary gradients to make its state; with `fresh_grads`, free the gradients."""
        for parameter in self.network.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        self._step_optimizer()

    @contextmanager
    def state_restored(self) -> Iterator[None]:
        """Restore gradients and optimizer state after the context. Inside it, steps over the limit change no plan."""
        with undoing() as undo, set_meanwhile((self.network, {"watch": False})):
            undo += [partial(setattr, each, "grad", each.grad) for each in self.network.parameters()]
            if self.optimizer is not None:
                state = {key: dict(each) for key, each in self.optimizer.state.items()}
                undo += [partial(self.optimizer.state.update, state), self.optimizer.state.clear]
            yield


def _loss_in(output: Any) -> torch.Tensor:
    found = [each for each in tensors_in(output) if each.dim() == 0 and each.requires_grad]
    made = found[0] if found else scalar_after(output)
    assert made is not None  # a planned network has parameters to train
    return made


class FollowedStep(FollowedStorages):
    """Context that lists, in `events`, the requests to CUDA's allocator: for storages, and for scratch of kernels.

    The first events allocate the workspaces that cuBLAS keeps on `device`, and the storages of the tensors `present`.
    """

    def __init__(self, present: Iterable[torch.Tensor] = (), device: Device | None = None) -> None:
        super().__init__()
        self.stream = 0  # CUDA stream of the next requests; the allocator has pools for each stream
        self.events: list[Event] = []
        if device is not None:
            size = workspace_bytes(device) // WORKSPACES
            self.events += [Allocate(f"workspace {number}", size) for number in range(WORKSPACES)]
        for tensor in present:
            self.follow(local(tensor).untyped_storage())
        self.before = len(self.events)  # number of events before the entry of the context

    def taken(self, number: int, size: int) -> None:
        self.events.append(Allocate(number, size, self.stream))

    def freed(self, number: int) -> None:
        self.events.append(Free(number))

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inside = scratch_bytes(func, args, kwargs, out)
        if inside:
            inner = ("inside", len(self.events))
            self.events += [Allocate(inner, inside, self.stream), Free(inner)]


def reservation_of(events: Sequence[Event], device: Device) -> Reservation:
    usable = device.usable_bytes
    plain, expandable = (_reserved(events, usable, expandable=each) for each in (False, True))
    gives_back = plain <= usable < replay(events).reserved_bytes
    return Reservation(device.name, usable, most_bytes(events), plain, expandable, gives_back)


def _reserved(events: Sequence[Event], usable: int, *, expandable: bool) -> int:
    """Return the peak of reserved bytes; if it exceeds `usable`, the least limit that works, to within a segment."""
    much, little = replay(events, expandable=expandable).reserved_bytes, usable
    if much <= usable:
        return much
    with suppress(DeviceFullError):
        return replay(events, expandable=expandable, limit=usable).reserved_bytes
    while much - little > LARGE_SEGMENT:
        middle = (little + much) // 2
        try:
            replay(events, expandable=expandable, limit=middle)
            much = middle
        except DeviceFullError:
            little = middle
    return much


# Number of smaller limits that are tried at most. A guess: with fewer, the last plan may not fit the device.
_ROUNDS = 2


def find_reservation(step: SimulatedStep, device: Device, *, keep_limit: bool) -> Reservation:
    """Predict the bytes that the allocator of `device` reserves for the planned `step`.

    Unless `keep_limit`, plans for a lower limit, up to `_ROUNDS` times, while these bytes exceed the device's memory.
    """
    network = step.network
    for attempt in range(_ROUNDS + 1):
        plan, limit = plan_of(network), network.mem_limit
        budget, sequence = plan.budget, plan.followed
        # At least the plan's peak, which covers every order of several backwards: `step` has one order only.
        found = reservation_of(followed_by_plan(step, device).events, device).at_least(budget.peak_bytes(sequence))
        # Subtract from the plan's peak, not from the limit: a limit above the peak would give the same plan again.
        smaller = budget.peak_bytes(sequence) - found.missing_bytes
        if keep_limit or attempt == _ROUNDS or not found.missing_bytes or smaller < budget.least_bytes():
            break
        network.mem_limit = smaller
        try:
            network.compute_sequence()
        except InfeasibleError:  # the plan also has to fit other processes, which may need more
            network.mem_limit, network.sequence = limit, sequence
            break
    return found


def followed_by_plan(step: SimulatedStep, device: Device) -> FollowedStep:
    """Trace two steps: the first allocates the optimizer's state between other blocks, the second runs with it."""
    with step.state_restored():
        step()  # not traced: a plan's first step does more than others, such as capturing the model
    return _traced(step, device, 2)


def _traced(step: SimulatedStep, device: Device, steps: int) -> FollowedStep:
    followed = FollowedStep(tensors_before_step(step.network, step.optimizer, step.value), device)
    with step.state_restored(), gathering_apart(followed), followed:
        for _ in range(steps):
            step()
    return followed


# FSDP decides during a step which gathered parameters are in memory together. Real processes plan with an upper bound
# of their bytes (`gathered_bytes`). A simulation replaces this bound by the bytes that steps on fake tensors take.

_GATHERING = 1


@contextmanager
def gathering_apart(step: FollowedStep) -> Iterator[None]:
    """Within the context, FSDP2's all-gathers request memory on a stream, hence in pools, of their own, as on CUDA."""
    group: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if group is None:  # FSDP2 shards no module
        yield
        return
    gather = group.foreach_all_gather

    def gathered(*args: Any, **kwargs: Any) -> Any:
        with set_meanwhile((step, {"stream": _GATHERING})):
            return gather(*args, **kwargs)

    with set_meanwhile((group, {"foreach_all_gather": gathered})):
        yield


# For each round of `find_room`: the share by which its plan allows more communication bytes than the last plan's step
# took, since a plan with less memory recomputes other stages, whose gathered parameters may be larger. Guesses: too
# much wastes memory; without any, no plan for a Llama of 80 layers kept to its bytes.
_SLACK = (0.0, 0.0, 0.03, 0.06, 0.12)


def find_room(step: SimulatedStep, device: Device) -> None:
    """Plan the measured network of `step` with as many communication bytes as its planned step takes.

    If the step takes more than planned in every round, the budget has FSDP's upper bound again. If no plan fits,
    returns without an error: `compute_sequence` will raise it when it is called next.
    """
    network = step.network
    budget = plan_of(network).budget
    step.prepare()
    taken = 0
    for slack in _SLACK:
        room = int((1 + slack) * taken)
        network.divide(budget.with_communication(room))
        try:
            network.compute_sequence()
        except InfeasibleError:
            return
        taken = _communication_of(step, device)
        if taken <= room:
            return
    network.divide(budget)


def promise(step: SimulatedStep, device: Device) -> None:
    """If the step takes more communication bytes than planned, budget them, and raise the limit to the new peak."""
    network = step.network
    budget, sequence = plan_of(network).budget, plan_of(network).followed
    taken = _communication_of(step, device)
    if taken > budget.fixed.communication:
        divided = budget.with_communication(taken)
        network.divide(divided)
        network.sequence = sequence
        network.mem_limit = max(limit_bytes(network.mem_limit, network.device), divided.peak_bytes(sequence))


def _communication_of(step: SimulatedStep, device: Device) -> int:
    """Return the communication bytes for which the plan's predicted peak is the peak of a step on fake tensors."""
    followed, plan = _traced(step, device, 1), plan_of(step.network)
    risen = most_bytes(followed.events, followed.before)
    return plan.budget.fixed.total + risen - plan.budget.peak_bytes(plan.followed)
