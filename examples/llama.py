"""A small Llama, as transformers has it: keyword arguments in, its own loss out.

python examples/llama.py
rotor-plan examples/llama.py --mem-limit 400MB --fresh-grads --verify
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rotor_py import Checkpointable


def model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4000,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )


def sample(batch=4):
    ids = torch.randint(4000, (batch, 256))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def loss(output):
    return output.loss


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


if __name__ == "__main__":
    network = model()
    steps = optimizer(network.parameters())
    network = Checkpointable(network, mem_limit="400MB", loss=loss, optimizer=steps, fresh_grads=True)
    for number in range(3):
        value = loss(network(**sample()))
        steps.zero_grad()
        value.backward()
        steps.step()
        print(f"step {number}: loss {value.item():.3f}")
    print(network.summary())
