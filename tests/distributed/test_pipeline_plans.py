"""Planned pipelines, run by torch.distributed.pipelining: every rank stays inside the limit that it was planned for."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from rotor_py import Checkpointable
from rotor_py.measure.pipeline_costs import pipeline_costs
from rotor_solver import Sequence, plan_pipeline
from tests.distributed.pipelines import received
from tests.distributed.processes import Processes, device, least_peak, present_bytes

SAMPLES, WIDTH, MICROBATCHES = 512, 32, 6


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def planned(share: float) -> list[Any]:
    """The limit; and the first stage, end, sequence and peak of each rank: as found by rank 0, since times differ."""
    target = torch.randn(SAMPLES, WIDTH)
    network = Checkpointable(nn.Sequential(*layers()), loss=lambda output: loss(output, target))
    network.measure(torch.randn(SAMPLES, WIDTH))
    assert network.inspection_values is not None
    measured = network.inspection_values, network.device
    costs = pipeline_costs(network.model, network.functions, *measured, microbatches=MICROBATCHES)

    def within(limit: int) -> Any:
        options: dict[str, Any] = {"fixed": costs.fixed, "buffers": True}
        return plan_pipeline(costs.chain, dist.get_world_size(), limit, MICROBATCHES, "1f1b", **options)

    limit = int(share * max(within(2**40).timeline.peaks))
    found: list[Any] = [
        limit,
        [(part.begin, part.end, str(part.sequence), part.peak_bytes) for part in within(limit).parts],
    ]
    dist.broadcast_object_list(found)
    return found


def peak(rank: int, share: float) -> tuple[int, int, int, str]:
    """The measured peak of a rank in a step, the predicted one, the limit, and the sequence."""
    limit, parts = planned(share)
    begin, end, text, predicted = parts[rank]
    first, last = rank == 0, rank == len(parts) - 1
    model = Checkpointable(nn.Sequential(*layers()[begin:end]))
    model.measure(torch.randn(SAMPLES, WIDTH, requires_grad=not first))
    model.sequence = Sequence.parse(text)
    pipeline = Schedule1F1B(PipelineStage(model, rank, len(parts), device()), MICROBATCHES, loss_fn=loss)
    batch, target = (torch.randn(MICROBATCHES * SAMPLES, WIDTH) for _ in range(2))

    def step() -> None:
        pipeline.step(*([batch] if first else []), **({"target": target} if last else {}))

    for _ in range(2):
        step()
    buffers = received(pipeline._stage)
    parameters = list(model.parameters())
    # The target belongs to the loss, which the caller hands in.
    present = [*parameters, *(p.grad for p in parameters), *buffers, *([batch] if first else [])]
    dist.barrier()
    # Costs of a pipeline are those of its step alone, and on CUDA all that the process has is measured.
    beside = max(0, present_bytes() - sum(each.nbytes for each in present))
    return least_peak(step, present, min(predicted, limit) + beside) - beside, predicted, limit, text


def test_the_measured_peak_of_every_rank_is_inside_the_limit(processes: Processes) -> None:
    found = processes.run(peak, 0.75)
    for measured, predicted, limit, _ in found:
        assert 0.9 * predicted <= measured <= 1.001 * predicted <= 1.001 * limit
        assert measured <= limit
    assert any("CF_" in sequence for *_, sequence in found)
