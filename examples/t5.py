"""A small T5: the encoder's output stays in memory while the decoder works, and is carried past its stages.

python examples/t5.py
rotor-plan examples/t5.py --mem-limit 420MB --fresh-grads --verify
"""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from rotor_py import Checkpointable


def model():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=2000, d_model=256, d_kv=32, d_ff=1024, num_layers=6, num_heads=8, decoder_start_token_id=0)
    )


def sample(batch=4):
    ids = torch.randint(2000, (batch, 192))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(2000, (batch, 128))}


def loss(output):
    return output.loss


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


if __name__ == "__main__":
    network = model()
    steps = optimizer(network.parameters())
    network = Checkpointable(network, mem_limit="420MB", loss=loss, optimizer=steps, fresh_grads=True)
    for number in range(3):
        value = loss(network(**sample()))
        steps.zero_grad()
        value.backward()
        steps.step()
        print(f"step {number}: loss {value.item():.3f}")
    print(network.summary())
