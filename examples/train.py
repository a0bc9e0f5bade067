"""A training loop inside a limit: `python examples/train.py`. The three lines that matter are marked."""

import torch
from torch import nn

from rotor_py import Checkpointable, models  # 1

network = models.resnet18(num_classes=10)
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
network = Checkpointable(network, mem_limit="190MB", optimizer=optimizer, fresh_grads=True)  # 2

for step in range(3):
    images, labels = torch.randn(32, 3, 64, 64), torch.randint(10, (32,))
    loss = nn.functional.cross_entropy(network(images), labels)  # 3: as ever
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
print(network.summary())
