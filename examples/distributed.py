"""Several processes train one model, each inside a limit: DistributedDataParallel, or with --fsdp fully_shard.

torchrun --nproc-per-node 2 examples/distributed.py
torchrun --nproc-per-node 2 examples/distributed.py --fsdp
torchrun --nproc-per-node 2 examples/distributed.py --fsdp --llama
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rotor_py import Checkpointable, format_bytes


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def blocks() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(8)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def loss(output) -> torch.Tensor:
    return output.square().mean() if isinstance(output, torch.Tensor) else output.loss


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = (llama() if "--llama" in sys.argv else blocks()).to(device)
    if "--fsdp" in sys.argv:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for each in model.model.layers if "--llama" in sys.argv else model:
            fully_shard(each, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    limit = "250MB" if cuda else "130MB"  # cuBLAS takes up to 70 MB of a device's memory for itself
    planned = wrapped = Checkpointable(model, mem_limit=limit, loss=loss, optimizer=optimizer)
    if "--fsdp" not in sys.argv:
        wrapped = DistributedDataParallel(planned)
    batch = {"input": torch.randn(1024, 256, device=device)}
    if "--llama" in sys.argv:
        ids = torch.randint(256, (8, 128), device=device)
        batch = {"input_ids": ids, "labels": ids}
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(wrapped(**batch))
        value.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        peak = format_bytes(planned.budget.peak_bytes(planned.sequence))
        print(f"{dist.get_world_size()} processes, loss {value.item():.3f}, predicted peak of each {peak}")
        print(planned.sequence)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
