"""Count fixed memory: the bytes of a step that every plan needs, such as parameters, gradients and optimizer state.

Gradients of parameters that are stepped in the backward do not count: each is freed right after its parameter's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from rotor_profiling import OptimizerCost, bytes_like, storage_bytes, storages, tensors_in
from rotor_profiling.backends import prediction
from rotor_profiling.isolate import gradients_of, trained_parameters
from rotor_profiling.optimizer import scratch_alone
from rotor_profiling.stage.gradients import Stepped
from rotor_py.distributed.sharding import is_sharded
from rotor_py.measure.cut import Cut
from rotor_py.measure.device import allocated_bytes, segments_expand
from rotor_py.units import exact_bytes, format_bytes
from rotor_solver import InfeasibleError

_UNSPLIT = 8 * 2**20


@dataclass(frozen=True, slots=True)
class SteppedParameters:
    """The `parameters` that are stepped in the backward. `scratch` maps their ids to temporary bytes of their steps."""

    scratch: Mapping[int, int] = field(default_factory=dict)
    parameters: tuple[torch.Tensor, ...] = ()
    sharded: bool = False
    """Whether `fully_shard` was applied to the model."""

    def __bool__(self) -> bool:
        return bool(self.scratch)

    def among(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the members of `parameters` that are stepped in the backward, each once."""
        return list({id(each): each for each in parameters if id(each) in self.scratch}.values())

    def others(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [each for each in parameters if id(each) not in self.scratch]

    def by_stage(self, cut: Cut) -> list[Stepped]:
        """Return, for each parameter of each stage, the temporary bytes of its step, or None if not stepped there."""
        if not self:
            return [()] * len(cut.stages)
        seen: set[int] = set()
        found = []
        for _, function in cut.stages:  # the first stage with a parameter is the last to run its backward
            mine = [id(each) for each in trained_parameters(function)]
            found.append(tuple(None if each in seen else self.scratch.get(each) for each in mine))
            seen.update(mine)
        return found

    def waiting(self, cut: Cut) -> tuple[int, ...]:
        """Return, for each stage, bytes of shared parameters' gradients that its backward begins less those it ends."""
        return _waiting([self.among(trained_parameters(function)) for _, function in cut.stages])

    def summed_up(self, cut: Cut) -> tuple[int, ...]:
        """Return the same as `waiting` for parameters that are not stepped in the backward and have a `grad` before.

        Autograd then sums the gradients of all stages that share a parameter before it adds the sum to `grad`.
        """
        if self.sharded:
            return ()  # such sums are in FSDP's buffers, which count as communication
        return _waiting([self.others(trained_parameters(function)) for _, function in cut.stages])


def _waiting(parameters: Sequence[Sequence[torch.Tensor]]) -> tuple[int, ...]:
    uses: dict[int, list[int]] = {}
    for number, mine in enumerate(parameters):
        for each in mine:
            uses.setdefault(id(each), []).append(number)
    nbytes = {id(each): bytes_like([each]) for mine in parameters for each in mine}
    found = [0] * len(parameters)
    for key, stages in uses.items():
        found[stages[-1]] += nbytes[key]
        found[stages[0]] -= nbytes[key]
    return tuple(found)


NONE_STEPPED = SteppedParameters()


def stepped_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> SteppedParameters:
    """Return the parameters of `model` that `optimizer` steps in the backward; no parameters if `optimizer` is None.

    Raises UnknownOptimizerError if the temporary bytes of a step cannot be found.
    """
    if optimizer is None:
        return SteppedParameters(sharded=is_sharded(model))
    scratch = scratch_alone(optimizer)
    found = tuple(each for each in model.parameters() if id(each) in scratch)
    return SteppedParameters({id(each): scratch[id(each)] for each in found}, found)


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """Bytes on the device that every plan needs throughout the step.

    `communication`: buffers for sending gradients and gathering sharded parameters. `batch`: the model's input, except
    the part that counts as the chain's input. `other`: further allocations of this process, and outputs and the loss,
    if the caller keeps them to the end of the step.
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
        return sum(getattr(self, each.name) for each in fields(self))

    def in_words(self) -> str:
        """Return a text with the size and the name of each field that is not 0."""
        sizes = {each.name: getattr(self, each.name) for each in fields(self)}
        words = [f"{format_bytes(size)} {name}" for name, size in sizes.items() if size]
        return ", ".join(words).replace(" optimizer", " optimizer state")


def known_memory(
    model: nn.Module,
    sample: object,
    device: torch.device,
    *,
    fresh_gradients: bool,
    optimizer: OptimizerCost | None,
    stepped: SteppedParameters = NONE_STEPPED,
) -> FixedMemory:
    """Return the fixed memory of a step of `model` that is known before measuring; `batch` is the whole `sample`."""
    parameters, buffers = storages(_on(device, model.parameters())), storages(_on(device, model.buffers()))
    return FixedMemory(
        parameters=sum(parameters.values()),
        # Do not count buffers that are views of parameters.
        buffers=sum(size for storage, size in buffers.items() if storage not in parameters),
        gradients=kept_gradient_bytes(model, device, fresh=fresh_gradients, stepped=stepped),
        optimizer=optimizer.state_bytes if optimizer else 0,
        # Do not count inputs that are buffers, such as an attention mask that a captured graph takes.
        batch=storage_bytes(_on(device, tensors_in(sample)), owned_elsewhere={**parameters, **buffers}),
    )


def kept_gradient_bytes(
    model: nn.Module, device: torch.device, *, fresh: bool, stepped: SteppedParameters = NONE_STEPPED
) -> int:
    """Return the bytes of gradients kept throughout a step: not of those freed between steps (`fresh`) or `stepped`."""
    # `zero_grad` frees only gradients of the optimizer's parameters, so gradients of frozen parameters may stay.
    frozen = gradients_of(p for p in model.parameters() if not p.requires_grad)
    return storage_bytes(_on(device, frozen)) + (0 if fresh else trained_bytes(model, device, stepped))


def trained_bytes(model: nn.Module, device: torch.device, stepped: SteppedParameters = NONE_STEPPED) -> int:
    """Return the bytes of gradients of the trained parameters on `device` that are not `stepped` in the backward."""
    return bytes_like(p for p in stepped.others(model.parameters()) if p.requires_grad and p.device == device)


def _on(device: torch.device, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.device == device]


def unsplit_bytes(device: torch.device, saved: int) -> int:
    """Return the bytes to reserve for unused ends of CUDA's memory blocks, if the stages of a step save `saved` bytes.

    If a free block is larger than a tensor by at most 1 MiB, CUDA's allocator gives it the whole block (`should_split`
    in c10/cuda/CUDACachingAllocator.cpp), except in expandable segments. On an H100, steps of 27 to 41 GB took up to
    3.5 MiB more than their stages. Reserves 8 MiB, or `saved` / 100 if less.
    """
    if device.type != "cuda" or prediction() is not None or segments_expand(device):
        return 0
    return min(_UNSPLIT, saved // 100)


def unaccounted_bytes(
    device: torch.device, parameters: list[nn.Parameter], accounted: int, optimizer: OptimizerCost | None
) -> int:
    """Return the bytes allocated on the device in addition to `accounted`; 0 on the CPU, where they are unknown.

    Subtracts gradients and optimizer state that exist now, since `known_memory` includes them.
    """
    if (predicted := prediction()) is not None:
        return predicted.workspace_bytes
    allocated = allocated_bytes(device)
    if allocated is None:
        return 0
    present = storage_bytes(_on(device, gradients_of(parameters)))
    return max(0, allocated - accounted - present - (optimizer.present_bytes if optimizer else 0))


def static_infeasibility(
    model: nn.Module,
    sample: object,
    device: torch.device,
    mem_limit: int,
    *,
    fresh_gradients: bool,
    optimizer: OptimizerCost | None,
    stepped: SteppedParameters = NONE_STEPPED,
) -> InfeasibleError | None:
    """Return the error to raise if the fixed memory of a step of `model` on `sample` exceeds `mem_limit`; else, None.

    The error's `min_bytes` are a lower bound: a step also needs saved tensors, which are not measured yet.
    """
    known = known_memory(model, sample, device, fresh_gradients=fresh_gradients, optimizer=optimizer, stepped=stepped)
    # When the optimizer steps, gradients exist even if they are freed between steps, and the batch may be freed.
    fresh = trained_bytes(model, device, stepped) if fresh_gradients else 0
    stepping = known.total - known.batch + fresh
    least = max(known.total, stepping)
    if least <= mem_limit:
        return None
    beside = f", and {format_bytes(fresh)} gradients when the optimizer steps" if stepping > known.total else ""
    needs = ""
    freed = max(known.total - known.gradients, known.total - known.batch)
    if known.gradients and freed <= mem_limit:
        needs = (
            " If your loop frees gradients between steps (optimizer.zero_grad()), say so: with fresh_grads=True "
            f"(--fresh-grads) these are {exact_bytes(freed)}."
        )
    message = (
        f"before measuring: a training step needs at least {exact_bytes(least)}, for {known.in_words()}{beside}; the "
        f"limit is {exact_bytes(mem_limit)}, so it would run out of memory.{needs} Try a smaller batch, an optimizer "
        "with less state, parameters in bfloat16, fully_shard over several devices, or a larger limit."
    )
    return InfeasibleError(message, min_bytes=least, mem_limit=mem_limit, kind="limit_below_held")
