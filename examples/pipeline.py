"""A pipeline whose ranks each stay inside a limit of their own: 1F1B, or with --zero-bubble a zero-bubble schedule.

torchrun --nproc-per-node 2 examples/pipeline.py
torchrun --nproc-per-node 2 examples/pipeline.py --zero-bubble
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

from rotor_py import Checkpointable, format_bytes
from rotor_py.distributed.pipelining import buffer_bytes, microbatches_in_flight, whole_backward

SAMPLES, WIDTH, MICROBATCHES = 512, 256, 8


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, WIDTH))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Checkpointable(nn.Sequential(*(block() for _ in range(6))).to(device), watch=False)
    # Two backwards in one: a stage that is run again computes both anyway, and holds nothing until the second.
    stage = PipelineStage(model, rank, ranks, device, dw_builder=whole_backward)
    if "--zero-bubble" in sys.argv:
        schedule = ScheduleInterleavedZeroBubble([stage], MICROBATCHES, loss_fn=loss)
    else:
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    sample = torch.randn(SAMPLES, WIDTH, device=device, requires_grad=rank > 0)
    buffers = buffer_bytes(schedule, stage, sample, sample)
    model.forwards_in_flight = microbatches_in_flight(schedule)[rank]
    model.measure(sample)
    model.compute_sequence(60_000_000 - buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(MICROBATCHES * SAMPLES, WIDTH, device=device)
    for _ in range(3):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        last = {"target": torch.zeros_like(batch), "losses": losses} if stage.is_last else {}
        schedule.step(*([batch] if stage.is_first else []), **last)
        optimizer.step()
    print(
        f"rank {rank}: up to {model.forwards_in_flight} microbatches in flight",
        f"{format_bytes(buffers)} to send and receive",
        model.summary(),
        sep="; ",
    )
    if stage.is_last:
        print(f"loss {torch.stack(losses).mean().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
