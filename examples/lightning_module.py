"""A LightningModule that trains inside a limit: `python examples/lightning_module.py`. One line is added to it."""

import lightning
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_py.units import format_bytes


def blocks():
    inner = [nn.Sequential(nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c in (3, 16, 16, 16, 16)]
    return nn.Sequential(*inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = blocks()
        self.network = Checkpointable(self.network, data[0][0], mem_limit="24MB")  # the line

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    data = [(torch.randn(8, 3, 64, 64), torch.randint(10, (8,))) for _ in range(3)]
    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False
    )
    batches = torch.utils.data.DataLoader(data, batch_size=None)
    present = [*module.parameters(), *module.buffers(), *data[0]]
    peak = measured_peak(lambda: trainer.fit(module, batches), present, torch.device("cpu"))
    print(module.network.summary())
    print(f"peak of an epoch: {format_bytes(peak)}; limit: {module.network.mem_limit}")
