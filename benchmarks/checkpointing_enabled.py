"""Plans inside the peak of `gradient_checkpointing_enable()`, for families of transformers.

    python benchmarks/checkpointing_enabled.py             # on the CPU; prints the table. Needs transformers
    python benchmarks/checkpointing_enabled.py --write     # also into docs/benchmarks.md and benchmarks/results/

A step is what people write, `model(**batch).loss.backward()`: it drops the logits before the backward. The limit of a
plan is the peak that was measured with every block checkpointed. Peaks and times are those of forward and backward,
from no gradients; times are the processor's, taken in turns: the median of a turn's ratios. Exits 1 if there is no plan
in one of these peaks, or a plan's peak is above it.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ecosystem import Case, bert, gpt2, its_own, llama, mixtral, t5, vit, whisper, words
from report import write
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, InfeasibleError, format_bytes

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 4000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "ffn_dim": 352,
    "word_embed_proj_dim": 128,
    "pad_token_id": 0,
}
Row = dict[str, Any]


def language_model(family: str) -> Case:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{name: size for name, size in SIZES.items() if name in fields})
    return AutoModelForCausalLM.from_config(config), words(4, 128, 4000), its_own


FAMILIES: dict[str, Callable[[], Case]] = {
    "Llama": llama,
    **{name: partial(language_model, name) for name in ("qwen2", "mistral", "gemma2", "phi3", "opt", "gpt_neox")},
    "GPT-2": gpt2,
    "Mixtral": mixtral,
    "BERT": bert,
    "T5": t5,
    "Whisper": whisper,
    "ViT": vit,
}


def step(model: nn.Module, inputs: dict[str, Any]) -> None:
    model(**inputs).loss.backward()


def peak(model: nn.Module, inputs: dict[str, Any]) -> int:
    model.zero_grad()
    return measured_peak(lambda: step(model, inputs), [*model.parameters(), *model.buffers(), *inputs.values()], CPU)


def seconds(model: nn.Module, inputs: dict[str, Any]) -> float:
    model.zero_grad()
    began = time.process_time()
    step(model, inputs)
    return time.process_time() - began


def run(name: str, repeats: int) -> Row:
    torch.manual_seed(0)
    model, inputs, _ = FAMILIES[name]()
    model.train()
    model.config.use_cache = False  # type: ignore[union-attr]  # checkpointing switches it off
    plain, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    by_hand.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    planned = Checkpointable(model, fresh_grads=True)
    planned.measure(inputs)
    assert planned.budget is not None
    limit = peak(by_hand, inputs)
    row = {"model": name, "plain_bytes": peak(plain, inputs), "by_hand_bytes": limit}
    row |= {"least_bytes": planned.budget.least_bytes(), "planned_bytes": None, "planned_time": None}
    models = [plain, by_hand]
    try:
        planned.compute_sequence(limit)
        row["planned_bytes"] = peak(planned, inputs)
        models.append(planned)
    except InfeasibleError:
        pass
    turns = [[seconds(each, inputs) for each in models] for _ in range(repeats + 1)][1:]
    ratios = [statistics.median(turn[i] / turn[0] for turn in turns) for i in range(len(models))]
    return row | dict(zip(("by_hand_time", "planned_time"), ratios[1:], strict=False))


def table(rows: list[Row]) -> str:
    lines = [
        "| model | plain | every block: peak | time | least limit | planned in that peak: peak | time |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sizes = [format_bytes(row[f"{each}_bytes"]) for each in ("plain", "by_hand", "least")]
        planned = "no plan | "
        if row["planned_time"] is not None:
            planned = f"{format_bytes(row['planned_bytes'])} | ×{row['planned_time']:.2f}"
        lines.append(
            f"| {row['model']} | {sizes[0]} | {sizes[1]} | ×{row['by_hand_time']:.2f} | {sizes[2]} | {planned} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", help="part of a model's name")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # transformers 5 has another name for it
    names = [name for name in FAMILIES if options.only is None or options.only.lower() in name.lower()]
    rows = []
    for name in names:
        rows.append(run(name, options.repeats))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if options.write:
        write("checkpointing-enabled", table(rows), rows, CPU)
    if any(row["planned_bytes"] is None or row["planned_bytes"] > row["by_hand_bytes"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
