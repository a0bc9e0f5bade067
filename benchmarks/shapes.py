"""A language model that is planned for one shape and trained on smaller ones: what does the first step of each take?

    python benchmarks/shapes.py             # prints the table
    python benchmarks/shapes.py --write     # also into docs/benchmarks.md and benchmarks/results/

A GPT-2 of three layers, planned for 8 sequences of 128 tokens at the limit halfway between the least possible and
storing everything. TorchDynamo captures it in two graphs: the model, and its loss. Seconds are those of the processor,
which other programs do not change.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from report import write
from transformers import GPT2Config, GPT2LMHeadModel

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, format_bytes, store_all
from rotor_py.capture import captured_forward

SHAPES = [(8, 128), (8, 100), (5, 128), (7, 33), (2, 2), (1, 50), (1, 128), (8, 1), (3, 1), (1, 1)]


def batch(count: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1000, (count, length))
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0)
    captured: list[Any] = []
    backend = captured_forward._backend
    captured_forward._backend = lambda *given: captured.append(given) or backend(*given)  # type: ignore[func-returns-value]
    model = Checkpointable(GPT2LMHeadModel(config), fresh_grads=True)

    def seconds(run: Any) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    rows: list[dict[str, Any]] = []
    took = seconds(lambda: model.measure(batch(*SHAPES[0])))
    assert model.budget is not None
    limit = (model.budget.least_bytes() + model.budget.peak_bytes(store_all(model.budget.chain))) // 2
    model.compute_sequence(limit)
    rows.append({"what": "`measure`, 8 × 128", "graphs": len(captured), "first": took})
    for shape in SHAPES:
        captured.clear()
        inputs = batch(*shape)

        def step(inputs: Any = inputs) -> None:
            model.zero_grad()
            model(**inputs).loss.backward()

        first, made, second = seconds(step), len(captured), seconds(step)
        model.zero_grad()
        peak = measured_peak(step, [*model.parameters(), *model.buffers(), *inputs.values()], torch.device("cpu"))
        rows.append(
            {"what": f"{shape[0]} × {shape[1]}", "graphs": made, "first": first, "second": second, "peak_bytes": peak}
        )
    lines = ["| | graphs captured | first step | second step | measured peak |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        later = [f"{row['second']:.2f} s", format_bytes(row["peak_bytes"])] if "second" in row else ["", ""]
        lines.append(" | ".join(["", row["what"], str(row["graphs"]), f"{row['first']:.2f} s", *later, ""]).strip())
    lines += ["", f"The limit is {format_bytes(limit)}."]
    print("\n".join(lines))
    if options.write:
        write("shapes", "\n".join(lines), rows, torch.device("cpu"))
    if any(row.get("peak_bytes", 0) > limit for row in rows):
        raise SystemExit("a measured peak is over the limit")


if __name__ == "__main__":
    main()
