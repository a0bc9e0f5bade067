"""A small vision transformer that classifies images.

python examples/vit.py
rotor-plan examples/vit.py --mem-limit 270MB --fresh-grads --verify
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

from rotor_py import Checkpointable


def model():
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            num_hidden_layers=8,
            num_attention_heads=6,
            intermediate_size=768,
            image_size=96,
            patch_size=8,
            num_labels=10,
        )
    )


def sample(batch=16):
    return {"pixel_values": torch.randn(batch, 3, 96, 96), "labels": torch.arange(batch) % 10}


def loss(output):
    return output.loss


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


if __name__ == "__main__":
    network = model()
    steps = optimizer(network.parameters())
    network = Checkpointable(network, mem_limit="270MB", loss=loss, optimizer=steps, fresh_grads=True)
    for number in range(3):
        value = loss(network(**sample()))
        steps.zero_grad()
        value.backward()
        steps.step()
        print(f"step {number}: loss {value.item():.3f}")
    print(network.summary())
