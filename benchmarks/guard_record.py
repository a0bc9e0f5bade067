"""How `guard.py` records the steps of a model: with fixed times, every allocation, and digests of all numbers.

Public names only, so that the guard survives when internal modules move. No measured second enters a record: clocks
are replaced by one that ticks when it is read, and sequences are found for `fixed_times`.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from typing import Any

import torch
from guard_chains import Record, number
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, InfeasibleError
from rotor_solver import Chain, Sequence, simulate, solve, store_all

CPU = torch.device("cpu")
LEAST_BLOCK = 8192
"""Bytes; smaller allocations are left out of the curve. A random state has 5,056, and when it is taken says nothing."""
OPERATORS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "native_batch_norm",
    "native_batch_norm_backward", "native_layer_norm", "native_layer_norm_backward", "gelu", "gelu_backward", "silu",
    "silu_backward", "_softmax", "_scaled_dot_product_flash_attention_for_cpu", "native_dropout", "bernoulli_",
    "embedding", "cat", "_log_softmax", "max_pool2d_with_indices",
)  # fmt: skip
"""Operators whose calls are counted: what is computed, and how often."""


# Clocks


@contextmanager
def fixed_clocks() -> Iterator[None]:
    """Replace the clocks for durations by one that ticks by 2⁻¹⁰ seconds, so without rounding, whenever it is read.

    So nothing that is measured in seconds depends on the machine, and neither does what is dropped because it is slow.
    """
    ticks = count(1)
    patched = {name: (lambda: next(ticks) / 1024) for name in ("perf_counter", "process_time", "thread_time")}
    patched |= {f"{name}_ns": (lambda: next(ticks) * 10**9 // 1024) for name in tuple(patched)}
    before = {name: getattr(time, name) for name in patched}
    open_file = os.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("/schedstat"):  # where the seconds are counted that a thread waits for a core
            raise FileNotFoundError(path)
        return open_file(path, *args, **kwargs)

    try:
        for name, clock in patched.items():
            setattr(time, name, clock)
        os.open = opened
        yield
    finally:
        os.open = open_file
        for name, clock in before.items():
            setattr(time, name, clock)


def fixed_times(chain: Chain) -> Chain:
    """The chain with seconds that follow from the positions of stages and options alone."""
    stages = []
    for position, stage in enumerate(chain.stages):
        forward = 1.0 + (7 * position % 5) / 8
        options = tuple(
            replace(option, forward_time=forward, backward_time=2 * forward + (0.25 + position % 3 / 8) * way)
            for way, option in enumerate(stage.options)
        )
        stages.append(replace(stage, options=options, nograd_time=forward - 0.0625, skipped_output_time=0.125))
    return replace(chain, stages=tuple(stages), loss_time=0.5)


@dataclass(frozen=True)
class FixedTimes:
    """An algorithm: the best persistent sequence for `fixed_times`."""

    name: str = "fixed times"
    asked: list[int] = field(default_factory=list)
    """The limits that it was asked for: what is left for the chain."""

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        self.asked.append(mem_limit)
        return solve(fixed_times(chain), mem_limit)


# Digests


def digest(values: Iterable[Any]) -> str:
    """The first 16 digits of a SHA-256 of tensors, by shape, type and bits, and of texts."""
    found = sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            tensor = getattr(value, "full_tensor", lambda value=value: value)().detach().contiguous()
            found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        else:
            found.update(str(value).encode())
    return found.hexdigest()[:16]


# Memory


def allocations(step: Callable[[], object]) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Every change of the bytes that the CPU holds while `step` runs, as (change, held after it), and operators' calls.

    Read with PyTorch's own profiler, and not with the product's meters.
    """
    with quiet():
        profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        with profile:
            step()
    blocks: list[tuple[int, int, int]] = []
    calls: dict[str, int] = {}
    pending = list(profile.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        if event.name == "[memory]":
            block = event.extra_fields
            if block.device.type == "cpu":
                blocks.append((event.start_time_ns, block.ptr, block.alloc_size))
            continue
        if event.name.startswith("aten::") and (name := event.name.removeprefix("aten::")) in OPERATORS:
            calls[name] = calls.get(name, 0) + 1
        pending.extend(event.children)
    changes, held = [], 0
    live: dict[int, int] = {}
    for _, address, size in sorted(blocks):
        freed = live.pop(address, 0)  # a block that is older than the profile was never counted
        change = size if size > 0 else -freed
        if size > 0:
            live[address] = size
        if change:
            held += change
            changes.append((change, held))
    return changes, dict(sorted(calls.items()))


def curve(changes: Iterable[tuple[int, int]]) -> list[int]:
    """The bytes at which memory stops to grow or to shrink, in turns; small blocks are left out."""
    turns, held, growing = [0], 0, True
    for change, _ in changes:
        if abs(change) < LEAST_BLOCK:
            continue
        held += change
        if (change > 0) == growing:
            turns[-1] = held
        else:
            turns.append(held)
            growing = not growing
    return turns


def thinned(turns: list[int]) -> list[int]:
    """The turns of a curve after which it goes by more than a twelfth of its height, so that a person can read it."""
    least = max(turns) // 12
    kept = [turns[0]]
    far = turns[0]
    """the furthest turn since the last that was kept"""
    for turn in turns[1:]:
        if (turn - far) * (far - kept[-1]) >= 0:
            far = turn
        elif abs(turn - far) > least:
            kept.append(far)
            far = turn
    return [*kept, far, turns[-1]]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep off stderr what the profiler's C++ library logs there when it starts and stops."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def live_bytes() -> int:
    """The bytes of all tensors that Python knows."""
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# Steps of models


@dataclass
class Trained:
    """A model, a batch and a loss; so many `forwards` come before one backward."""

    model: nn.Module
    inputs: dict[str, Any] | tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor]
    forwards: int = 1
    autocast: bool = False


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in an output, an input or a state."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_of(each)]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Trainee:
    """A model with an optimizer, which takes steps on a fixed batch."""

    def __init__(self, model: nn.Module, case: Trained, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.case, self.optimizer = model, case, optimizer

    def output(self) -> Any:
        inputs = self.case.inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)

    def step(self) -> list[torch.Tensor]:
        """Forwards, one backward and a step of the optimizer; returns the losses."""
        if self.case.forwards == 1:
            value = self.case.loss(self.output())
            value.backward()
            self.optimizer.step()
            return [value.detach()]
        values = [self.case.loss(self.output()) for _ in range(self.case.forwards)]
        torch.stack(values).sum().backward()
        self.optimizer.step()
        return [value.detach() for value in values]

    def digests(self, seed: int) -> Record:
        """Take a step; digests of all numbers afterwards."""
        self.optimizer.zero_grad()
        torch.manual_seed(seed)
        losses = self.step()
        return self.numbers(losses)

    def numbers(self, losses: list[torch.Tensor]) -> Record:
        parameters = list(self.model.named_parameters())
        gradients = [(name, p.grad) for name, p in parameters if p.grad is not None]
        return {
            "losses": digest(losses),
            "gradients": digest(each for pair in gradients for each in (pair[0].removeprefix("module."), pair[1])),
            "parameters": digest(p for _, p in parameters),
            "buffers": digest(self.model.buffers()),
            "random_state": digest([torch.get_rng_state()]),
            "autocast": torch.is_autocast_enabled("cpu"),
            "modes": digest(module.training for module in self.model.modules()),
        }

    def present(self) -> list[torch.Tensor]:
        state = [tensor for entry in self.optimizer.state.values() for tensor in tensors_of(entry)]
        found = [*self.model.parameters(), *self.model.buffers(), *state, *tensors_of(self.case.inputs)]
        return [local(each) for each in found]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def stage_records(chain: Chain) -> list[Record]:
    """The bytes of every stage as they were measured."""
    found = []
    for stage in chain.stages:
        options = [
            [o.name, o.saved, o.moved, o.forward_temp, o.backward_temp, o.backward_temp_of_replay]
            for o in stage.options
        ]
        found.append(
            {
                "name": stage.name,
                "activation": stage.activation,
                "options": options,
                "nograd_temp": stage.temp_without_graph,
                "gradient": stage.gradient,
                "released": [stage.input_released, stage.output_released],
            }
        )
    return found


def limits_of(planned: Checkpointable) -> dict[str, int]:
    budget = planned.budget
    assert budget is not None
    least, full = budget.least_bytes(), budget.peak_bytes(store_all(fixed_times(budget.chain)))
    return {"store-all": full, "halfway": (least + full) // 2, "least": least}


def plan_for(planned: Checkpointable, name: str, limit: int) -> int | None:
    """Have the sequence for this limit followed; it rests on fixed times. Returns what is left for the chain."""
    assert planned.chain is not None
    if name == "store-all":
        planned.sequence = store_all(fixed_times(planned.chain))
        return None
    algorithm = FixedTimes()
    try:
        planned.compute_sequence(limit, algo=algorithm)
    except InfeasibleError:
        planned.sequence = store_all(fixed_times(planned.chain))
    # Of several forwards in flight, the limit of each is searched for.
    return algorithm.asked[0] if len(algorithm.asked) == 1 else None


def record_model(
    make: Callable[[], Trained],
    options: Record | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    plan: Callable[[Checkpointable, str, int], int | None] = plan_for,
) -> Record:
    """Measure a model and train it at three limits.

    `wrap` is put around the model before it is planned. `plan` chooses the sequence.
    """
    gc.collect()
    before = live_bytes()
    torch.manual_seed(0)
    case = make()
    model = case.model.train()
    plain = wrap(copy.deepcopy(model))
    model = wrap(model)
    start = copy.deepcopy(model.state_dict())
    expected = []
    other = Trainee(plain, case, sgd(plain.parameters()))
    for seed in range(2):
        expected.append(other.digests(seed))
    del other, plain
    gc.collect()
    gc.disable()
    optimizer = sgd(model.parameters())
    random = torch.get_rng_state()
    untouched = digest(model.state_dict().values())
    planned = Checkpointable(
        model, loss=case.loss, optimizer=optimizer, fresh_grads=True, cache=False, progress=False, **(options or {})
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        planned.measure(case.inputs)
    budget = planned.budget
    assert budget is not None
    chain = budget.chain
    found: Record = {
        "measuring_changes": {
            "random_state": not torch.equal(random, torch.get_rng_state()),
            "model": untouched != digest(model.state_dict().values()),
            "gradients": any(p.grad is not None for p in model.parameters()),
        },
        "names": digest(planned.names),
        "stages": stage_records(chain),
        "chain": [chain.input_bytes, chain.loss_temp, chain.output_held],
        "fixed": {
            name: value
            for name in ("parameters", "buffers", "gradients", "optimizer", "batch", "communication", "other")
            if isinstance(value := getattr(budget.fixed, name, None), int)
        },
        "limits": {},
        "refused_below_least": refused(planned, budget.least_bytes() - 1),
    }
    trainee = Trainee(planned, case, optimizer)
    for name, limit in limits_of(planned).items():
        planned.load_state_dict(start)
        optimizer.state.clear()
        left = plan(planned, name, limit)
        record = record_limit(planned, trainee, expected)
        found["limits"][name] = {"limit": limit, "limit_of_chain": left, **record}
    seen = [weakref.ref(each) for each in (planned, model, next(iter(planned.parameters())))]
    trainee.optimizer.zero_grad()
    found["start_again"] = live_bytes() - before
    del planned, model, trainee, optimizer, budget, case, start, random
    found["alive_after_del"] = [each() is not None for each in seen]
    gc.enable()
    gc.collect()
    found["alive_after_collecting"] = [each() is not None for each in seen]
    found["bytes_after_collecting"] = live_bytes() - before
    return found


def refused(planned: Checkpointable, limit: int) -> int | None:
    """The least limit that works, as an error for `limit` has it."""
    try:
        planned.compute_sequence(limit, algo=FixedTimes())
    except InfeasibleError as error:
        return error.min_bytes
    return None


def record_limit(planned: Checkpointable, trainee: Trainee, expected: list[Record]) -> Record:
    """Three steps at a limit: by themselves, with the product's meter, and with every allocation counted."""
    budget, sequence = planned.budget, planned.sequence
    assert budget is not None
    assert sequence is not None
    simulated = simulate(fixed_times(budget.chain), sequence)
    numbers = [trainee.digests(0)]
    trainee.optimizer.zero_grad()
    torch.manual_seed(1)
    losses: list[torch.Tensor] = []
    peak = measured_peak(lambda: losses.extend(trainee.step()), trainee.present(), CPU)
    numbers.append(trainee.numbers(losses))
    losses.clear()
    trainee.optimizer.zero_grad()

    def whole_step() -> None:
        trainee.step()
        trainee.optimizer.zero_grad()

    changes, calls = allocations(whole_step)
    dropped, _ = allocations(trainee.output)
    after, turns = planned.sequence, curve(changes)
    return {
        "sequence": str(sequence),
        "beside": [str(each) for each in sequence.beside],
        "moves": str(sequence.moves),
        "sequence_after_steps": "the same" if after == sequence else str(after),
        "simulated": [number(simulated.makespan), simulated.peak, digest(simulated.after), digest(simulated.during)],
        "predicted_peak": budget.peak_bytes(sequence),
        "measured_peak": peak,
        "most_beside_what_was_there": max((held for _, held in changes), default=0),
        "differs_from_plain": differing(numbers, expected),
        "digests": numbers,
        "operators": calls,
        "curve": thinned(turns),
        "whole_curve": digest(turns),
        "held_after_step": changes[-1][1] if changes else 0,
        "held_after_dropped_output": dropped[-1][1] if dropped else 0,
    }


def differing(numbers: list[Record], expected: list[Record]) -> list[str]:
    """What is not as after plain training, in any step."""
    pairs = zip(numbers, expected, strict=True)
    return [name for mine, plain in pairs for name in mine if mine[name] != plain[name]]
