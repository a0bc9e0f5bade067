"""`estimate`: the same report, of a step on a device that is not there."""

from __future__ import annotations

import copy
import gc
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError, UnsupportedModelError, estimate
from rotor_py.estimation.device_table import find_device
from rotor_py.report import Report
from tests.estimation.shared import Block
from tests.fields import raises

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

BLOCK = 512


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)), nn.Linear(256, 10))


def rounded(tensors: Any) -> int:
    return sum(-(-each.numel() * each.element_size() // BLOCK) * BLOCK for each in tensors)


def test_parameters_state_and_batch_are_exact_in_the_blocks_of_cuda_also_of_a_model_made_by_a_function() -> None:
    model, batch = blocks(), torch.randn(64, 256)
    report = estimate(model, batch, "a100-80", optimizer=torch.optim.AdamW, loss=torch.mean)
    parameters = rounded(model.parameters())
    assert report.budget.fixed.parameters == report.budget.fixed.gradients == parameters
    # Two moments, and the count of steps stays on the CPU.
    assert report.budget.fixed.optimizer == 2 * parameters
    assert report.measurement.input_bytes == 64 * 256 * 4
    assert report.device == find_device("a100-80").name
    made = estimate(blocks, batch, "a100-80", optimizer=torch.optim.AdamW, loss=torch.mean)
    assert (made.budget, made.measurement.stages) == (report.budget, report.measurement.stages)
    assert report.fits
    assert report.mem_limit == int(0.9 * find_device("a100-80").usable_bytes)


def test_a_model_its_optimizer_and_the_process_are_left_as_they_are() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout()]
    model = nn.Sequential(*layers, nn.Linear(8 * 30 * 30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(2, 3, 32, 32)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.eval()
    estimate(model, batch, optimizer=optimizer, loss=torch.mean)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())


def test_seconds_are_those_of_the_device() -> None:
    slow, fast = (estimate(blocks, torch.randn(4096, 256), name, loss=torch.mean) for name in ("l4", "h100"))
    assert slow.store_all_seconds > 2 * fast.store_all_seconds > 0


def test_a_calibrated_cpu_runs_the_operators_of_the_cpu() -> None:
    cpu = replace(find_device("l4"), vendor="cpu")
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    report = estimate(model, torch.empty(512, 64), cpu, loss=torch.mean)
    assert report.measurement.stages[1].saved_bytes == 512 * 64 * (4 + 4)  # its mask has the numbers' width
    amd, nvidia = (estimate(model, torch.empty(512, 64), name, loss=torch.mean) for name in ("mi300x", "l4"))
    for each in (amd, nvidia):
        assert each.measurement.stages[1].saved_bytes == 512 * 64 * (4 + 1)
    said, of_a_gpu = (" ".join(str(each).split()) for each in (report, nvidia))
    assert "attention by the CPU's kernel, and batches without padding" in said
    for words in ("cuBLAS", "driver's context"):
        assert words in of_a_gpu
        assert words not in said


def test_recurrent_layers_are_named_but_not_on_a_cpu() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LSTMCell(16, 16), First(), nn.Linear(16, 4))
    batch, cpu = torch.empty(8, 16), replace(find_device("l4"), vendor="cpu")
    assert "recurrent layers (1)" in str(estimate(model, batch, "l4", loss=torch.mean))
    assert "recurrent" not in str(estimate(model, batch, cpu, loss=torch.mean))


def residual(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), *(Block(dropout=dropout) for _ in range(2)))


def bytes_in_part(network: Checkpointable | Report) -> int:
    measurement = network.measurement if isinstance(network, Report) else network.inspection_values
    return {way.name: way.cost.saved_bytes for way in measurement.ways[1]}["in part"]


@pytest.mark.slow
def test_layers_of_a_chain_are_stored_in_part_as_where_they_are_measured() -> None:
    batch, cpu = torch.randn(2048, 256), replace(find_device("l4"), vendor="cpu")
    measured = Checkpointable(residual(0.0), loss=torch.mean, fresh_grads=True, cache=False)
    measured.measure(batch)
    predict = partial(estimate, lambda: residual(0.0), batch, cpu, loss=torch.mean, fresh_grads=True)
    predicted = predict()
    assert bytes_in_part(predicted) == bytes_in_part(measured) < predicted.measurement.stages[1].saved_bytes
    assert "^" in str(predict(mem_limit=predicted.budget.least_bytes()).sequence)


def test_of_a_layer_in_part_the_operators_of_the_device_count() -> None:
    batch = torch.randn(2048, 256)
    cpu, gpu = (
        bytes_in_part(estimate(partial(residual, 0.1), batch, each, loss=torch.mean))
        for each in (replace(find_device("l4"), vendor="cpu"), find_device("l4"))
    )
    assert cpu - gpu == 3 * 2048 * 256, "a mask of one byte a number, not of four"


class First(nn.Module):
    def forward(self, value: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return value[0]


def test_a_model_larger_than_this_machine_is_planned_without_its_memory() -> None:
    def made() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2**17, 2**17, dtype=torch.bfloat16) for _ in range(2)))  # 69 GB

    batch = torch.empty(8, 2**17, dtype=torch.bfloat16, device="meta")
    report = estimate(made, batch, "b200", loss=torch.mean, fresh_grads=True)
    assert report.budget.fixed.parameters > 68 * 10**9


def test_where_nothing_fits_the_least_limit_is_said() -> None:
    with pytest.raises(InfeasibleError) as raised:
        estimate(blocks, torch.randn(64, 256), optimizer=torch.optim.AdamW, loss=torch.mean, mem_limit="20MB")
    least = raised.value.min_bytes
    report = estimate(blocks, torch.randn(64, 256), optimizer=torch.optim.AdamW, loss=torch.mean, mem_limit=least)
    assert report.peak_bytes == least


class Reads(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = super().forward(value)
        return made * 2 if made.sum().item() > 0 else made


def test_what_cannot_be_planned_is_refused() -> None:
    with raises(ValueError, "unknown_device", name="h1000"):
        estimate(blocks, torch.randn(2, 256), "h1000")
    with raises(UnsupportedModelError, "not_a_module"):
        estimate(lambda: 3, torch.randn(2, 256))  # type: ignore[arg-type, return-value]
    with raises(UnsupportedModelError, "depends_on_values"):
        estimate(nn.Sequential(nn.Linear(4, 4), Reads(4, 4)), torch.randn(2, 4), loss=torch.mean)


def test_counts_of_steps_keep_their_values() -> None:
    """A batch norm without momentum divides by its count."""
    norm = nn.BatchNorm1d(4, momentum=None)
    for model in (nn.Sequential(nn.Linear(4, 4), norm), lambda: nn.Sequential(nn.Linear(4, 4), norm)):
        assert estimate(model, torch.randn(2, 4), loss=torch.mean).fits


def test_afterwards_models_are_measured_again() -> None:
    estimate(blocks, torch.randn(64, 256), loss=torch.mean)
    model = blocks()
    network = Checkpointable(model, torch.randn(64, 256), "1GB", loss=torch.mean)
    assert network.report().predicted_for is None
    network(torch.randn(64, 256)).mean().backward()
    assert all(each.grad is not None for each in model.parameters())


def eight_billion() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, rope_theta=500_000.0, **sizes)
    return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_llama_of_8_billion_parameters_fits_a_card_of_80_gigabytes_if_its_optimizer_is_fused() -> None:
    pytest.importorskip("transformers")
    words = torch.zeros(2, 4096, dtype=torch.long)
    inputs = {"input_ids": words, "labels": words}
    options: dict[str, Any] = {"loss": lambda output: output.loss, "fresh_grads": True, "mem_limit": "76GiB"}
    report = estimate(eight_billion, inputs, "h100", optimizer=partial(torch.optim.AdamW, fused=True), **options)
    billions = 8_030_261_248
    assert report.budget.fixed.parameters == pytest.approx(2 * billions, rel=1e-6)
    assert report.budget.fixed.optimizer == pytest.approx(4 * billions, rel=1e-5)  # counts of steps are there, too
    assert report.store_all_bytes > 100 * 2**30
    assert report.peak_bytes <= 76 * 2**30
    assert 1.0 < report.overhead < 1.2
    # With foreach, the step of the optimizer makes copies of all parameters, and decides.
    with pytest.raises(InfeasibleError):
        estimate(eight_billion, inputs, "h100", optimizer=torch.optim.AdamW, **options)
    gc.collect()
