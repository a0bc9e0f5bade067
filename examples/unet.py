"""A U-Net of one's own: skip connections, batch normalisation, layers that work in place.

python examples/unet.py
rotor-plan examples/unet.py --mem-limit 170MB --fresh-grads --verify
"""

import torch
from torch import nn

from rotor_py import Checkpointable


def convolutions(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, widths=(16, 32, 64, 128), classes=3):
        super().__init__()
        self.down = nn.ModuleList(map(convolutions, (3, *widths[:-2]), widths[:-1]))
        self.bottom = convolutions(widths[-2], widths[-1])
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(convolutions(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, picture):
        skipped = []
        for block in self.down:
            skipped.append(block(picture))
            picture = nn.functional.max_pool2d(skipped[-1], 2)
        picture = self.bottom(picture)
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            picture = block(torch.cat([skipped.pop(), enlarge(picture)], 1))
        return self.head(picture)


def model():
    return UNet()


def sample(batch=8):
    return {"picture": torch.randn(batch, 3, 128, 128)}


def loss(output):
    return nn.functional.cross_entropy(output, torch.zeros_like(output[:, 0], dtype=torch.long))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


if __name__ == "__main__":
    network = model()
    steps = optimizer(network.parameters())
    network = Checkpointable(network, mem_limit="170MB", loss=loss, optimizer=steps, fresh_grads=True)
    for number in range(3):
        value = loss(network(**sample()))
        steps.zero_grad()
        value.backward()
        steps.step()
        print(f"step {number}: loss {value.item():.3f}")
    print(network.summary())
