"""A loop of Accelerate inside a limit: `python examples/accelerate_loop.py`. One line is added to the loop."""

import torch
from accelerate import Accelerator
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_py.units import format_bytes


def blocks():
    inner = [nn.Sequential(nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c in (3, 16, 16, 16, 16)]
    return nn.Sequential(*inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
network = blocks()
network = Checkpointable(network, mem_limit="24MB")  # the line
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
data = [(torch.randn(8, 3, 64, 64), torch.randint(10, (8,))) for _ in range(4)]
network, optimizer, batches = accelerator.prepare(
    network, optimizer, torch.utils.data.DataLoader(data, batch_size=None)
)


def epoch():
    for images, labels in batches:
        with accelerator.accumulate(network):
            loss = nn.functional.cross_entropy(network(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")


epoch()
state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
present = [*network.parameters(), *network.buffers(), *state, *data[0]]
peak = measured_peak(epoch, present, torch.device("cpu"))
print(network.summary())
print(f"peak of an epoch: {format_bytes(peak)}; limit: {network.mem_limit}")
