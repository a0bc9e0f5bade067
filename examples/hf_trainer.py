"""A Llama trained by transformers' `Trainer` inside a limit: `python examples/hf_trainer.py`. One line is added."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_py.units import format_bytes

SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_hidden_layers": 4}


def examples(count=32, length=128):
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(1000, (count, length))]


def trainer(network, steps, folder):
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    return Trainer(model=network, args=arguments, train_dataset=examples())


if __name__ == "__main__":
    network = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **SIZES))
    network = Checkpointable(network, mem_limit="28MB")  # the line
    with tempfile.TemporaryDirectory() as folder:
        first, then = trainer(network, 2, folder), trainer(network, 2, folder)
        first.train()
        del first
        network.zero_grad()
        peak = measured_peak(then.train, [*network.parameters(), *network.buffers()], torch.device("cpu"))
    print(network.summary())
    print(f"peak of a run of two steps: {format_bytes(peak)}; limit: {network.mem_limit}")
