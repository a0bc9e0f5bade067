"""Compute the seconds and bytes of a model's stages, by which to divide them among the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rotor_profiling import OptimizerCost, bytes_like, storages
from rotor_profiling.isolate import trained_parameters
from rotor_py.measure.measurement import Measurement
from rotor_py.stage.forward_state import moving_buffers
from rotor_solver import Chain


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """The `chain` for one microbatch. For each stage, `fixed` has the bytes in memory throughout the step, `stepping`
    those that the optimizer's step adds. `boundaries`: indices of stages with which a rank may begin.
    """

    chain: Chain
    fixed: tuple[int, ...]
    stepping: tuple[int, ...]
    boundaries: tuple[int, ...]


def pipeline_costs(
    model: nn.Module,
    stages: Sequence[nn.Module],
    measurement: Measurement,
    device: torch.device,
    *,
    microbatches: int,
    batch_bytes: int = 0,
    optimizer: OptimizerCost | None = None,
) -> PipelineCosts:
    """Return the costs of the `stages` of `model`, measured on one microbatch, if gradients stay between steps.

    Parameters that several stages share count in each, since ranks do not share memory. Parameters and seconds of
    layers before the chain count in the first stage; `batch_bytes`: bytes of the microbatch, which these layers read.
    """
    trained = [bytes_like(p for p in trained_parameters(stage) if p.device == device) for stage in stages]
    known: set[int] = set()
    fixed = []
    for stage, gradients, cost in zip(stages, trained, measurement.stages, strict=True):
        own = storages(tensor for tensor in (*stage.parameters(), *stage.buffers()) if tensor.device == device)
        known.update(own)
        # For each microbatch, buffers that change have two copies: one to restore, one that a recomputation writes to.
        snapshots = 2 * microbatches * bytes_like(moving_buffers(stage))
        fixed.append(sum(own.values()) + gradients + snapshots + microbatches * cost.left_bytes)
    rest = storages(tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device == device)
    fixed[0] += sum(size for address, size in rest.items() if address not in known) + microbatches * batch_bytes
    fixed[-1] += measurement.loss.kept_bytes * microbatches + measurement.returned_bytes
    # Ranks of a pipeline share no parameters, so no backward sums the gradients of a shared one.
    chain = replace(measurement, summed_gradients=()).chain(fresh_gradients=False)
    if (prefix := measurement.prefix) is not None:
        first, options = chain.stages[0], []
        for each in first.options:
            time, temp = each.forward_time + prefix.seconds, max(each.forward_temp, prefix.temp_bytes)
            options.append(replace(each, forward_time=time, forward_temp=temp))
        time, temp = first.seconds_without_graph + prefix.seconds, max(first.temp_without_graph, prefix.temp_bytes)
        first = replace(first, options=tuple(options), nograd_time=time, nograd_temp=temp)
        chain = replace(chain, stages=(first, *chain.stages[1:]))
    carried = [range(each.first, each.last + 1) for each in measurement.carried]
    whole = sum(trained) or 1
    state, step = (optimizer.state_bytes, optimizer.step_bytes) if optimizer else (0, 0)
    return PipelineCosts(
        chain,
        tuple(size + -(-state * own // whole) for size, own in zip(fixed, trained, strict=True)),
        tuple(-(-step * own // whole) for own in trained),
        tuple(point for point in range(1, len(stages)) if not any(point in past for past in carried)),
    )
