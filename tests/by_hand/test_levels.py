"""Levels: functions checkpointed by level, the levels of a model's modules, and the lowest that fits."""

from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import ActivationCheckpointing, ByLevel, InfeasibleError, assign_levels, best_level
from rotor_py.models import resnet18, vgg11
from tests.by_hand.networks import Block, assert_peak_as_predicted, assert_plain_training, checkpointed, rows, staged
from tests.checkpointable.steps import square
from tests.fields import raises


@pytest.mark.parametrize(("fn_level", "training_level"), [(0, 5), (3, 2), (3, 3)])
def test_a_function_is_run_again_if_the_training_level_reaches_its_own(fn_level: int, training_level: int) -> None:
    runs, run = [], ActivationCheckpointing(fn_level, training_level)

    def scaled(value: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        runs.append(scale)
        return value.square() * scale

    value = torch.ones(4, 48, requires_grad=True)
    run(scaled, value, scale=2.0).sum().backward()
    again = 0 < fn_level <= training_level
    assert runs == [2.0] * (1 + again)
    run.eval()
    run(scaled, value).sum().backward()
    assert len(runs) == 2 + again


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_functions_train_as_plain_ones_and_take_less_memory(use_reentrant: bool) -> None:
    def step(level: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks, run = nn.ModuleList(Block(48) for _ in range(6)), ActivationCheckpointing(2, level)
        hidden = value = torch.randn(256, 48, requires_grad=True)
        for block in blocks:
            hidden = run(block, hidden, use_reentrant=use_reentrant)
        hidden.square().sum().backward()
        return [value.grad, *(p.grad for p in blocks.parameters())]

    assert all(map(torch.equal, step(0), step(3)))
    peaks = [measured_peak(lambda level=level: step(level), [], torch.device("cpu")) for level in (0, 3)]
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("bad", [-1, 6, True, "2"])
def test_bad_levels_are_refused_in_a_sentence(bad: Any) -> None:
    for make in (lambda: ActivationCheckpointing(bad, 1), lambda: ActivationCheckpointing(1, bad)):
        with raises(ValueError, "unknown_level"):
            make()
    with raises(ValueError, "unknown_level"):
        ByLevel.of(staged(), bad)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def levels(model: nn.Module, names: list[str]) -> list[int]:
    found = assign_levels(model)
    assert list(found) == [name for name, _ in model.named_modules(remove_duplicate=False)]
    assert all(assigned.reason for assigned in found.values())
    return [found[name].level for name in names]


def test_the_levels_of_networks_of_torch_and_of_the_models_here() -> None:
    names = ["", "layers", "layers.1", "layers.1.self_attn", "layers.1.linear1"]
    assert levels(transformer(), names) == [5, 4, 3, 2, 1]
    names = ["", "layer1", "layer2.0", "layer2.0.conv1", "layer2.0.downsample", "fc"]
    with torch.device("meta"):
        assert levels(resnet18(), names) == [0, 4, 2, 1, 1, 1]
        assert levels(vgg11(), ["", "features", "features.0", "classifier"]) == [0, 4, 1, 2]
    assert levels(staged(), ["", "0", "1", "2", "2.0", "2.0.0", "2.0.0.0"]) == [0, 1, 1, 4, 2, 2, 1]
    assert levels(nn.Sequential(nn.Linear(2, 2), nn.Identity()), ["", "0", "1"]) == [0, 1, 0]
    assert "by its name" in assign_levels(transformer())["layers.1.self_attn"].reason


@pytest.mark.filterwarnings("ignore")
def test_the_levels_of_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **small))
    names = ["", "model", "model.layers", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp", "lm_head"]
    assert levels(llama, names) == [0, 5, 4, 3, 2, 2, 1]
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=32, **small))
    names = ["", "encoder", "encoder.layer", "encoder.layer.0", "encoder.layer.0.attention", "embeddings.dropout"]
    assert levels(bert, names) == [0, 5, 4, 3, 2, 1]
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    names = ["", "encoder", "decoder", "decoder.block", "decoder.block.1", "decoder.block.1.layer.1", "lm_head"]
    assert levels(transformers.T5ForConditionalGeneration(config), names) == [0, 5, 5, 4, 3, 2, 1]


def test_stages_of_one_module_form_a_group() -> None:
    levels = {"": 5, "a": 4, "a.0": 3, "a.1": 3, "a.0.x": 2, "a.0.x.p": 1, "b": 1, "c": 1}
    names = ["b", "a.0.x", "a.0#1", "a.0#2", "a.1+c", "c", "(top)"]
    assert ByLevel(3, levels).groups(names) == [range(1, 4), range(4, 5)]
    assert ByLevel(4, levels).groups(names) == [range(1, 5)]
    assert ByLevel(2, levels).groups(names) == [range(1, 2)]
    assert ByLevel(1, levels, frozenset({"c"})).groups(names) == [range(at, at + 1) for at in range(6)]
    assert ByLevel(1, levels, frozenset({"c"})).groups(["b", "c", "a.0.x.p"]) == [range(2), range(2, 3)]
    assert ByLevel(5, levels).groups(names) == [range(7)]


def test_a_captured_transformer_is_recomputed_by_its_layers() -> None:
    torch.manual_seed(0)
    model, batch = transformer(), torch.randn(8, 12, 16)
    planned = checkpointed(model, batch, level=3)
    groups = ByLevel.of(model, 3).groups(planned.names)
    assert [planned.names[group.start].startswith(f"layers.{i}") for i, group in enumerate(groups)] == [True] * 2
    assert_plain_training(planned, batch)
    assert_peak_as_predicted(planned, batch)


def test_the_lowest_level_that_fits_is_found_and_leaves_no_trace() -> None:
    network, batch = staged(), rows()
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    before = [t.clone() for t in (*network.parameters(), *network.buffers(), torch.get_rng_state())]
    sizes = best_level(network, batch, "1GB", loss=square, fresh_grads=True)
    assert sizes.level == 0
    limit = sizes.peaks[0] - 1
    choice = best_level(network.eval(), batch, limit, loss=square, fresh_grads=True)
    after = [*network.parameters(), *network.buffers(), torch.get_rng_state()]
    assert all(map(torch.equal, before, after))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in network.parameters())
    assert not any(module.training for module in network.modules())
    assert (choice.level, choice.mem_limit) == (next(i for i, peak in enumerate(choice.peaks) if peak <= limit), limit)
    for cost in (choice.chosen, choice.optimal):
        assert 0.98 * cost.predicted_peak_bytes <= cost.measured_peak_bytes <= cost.predicted_peak_bytes <= limit
        assert min(cost.predicted_seconds, cost.measured_seconds) > 0
    assert choice.optimal.predicted_seconds <= 1.05 * choice.chosen.predicted_seconds
    with raises(InfeasibleError, "no_level_fits") as caught:
        best_level(network, batch, min(choice.peaks) - 1, loss=square, fresh_grads=True)
    assert caught.value.min_bytes == min(choice.peaks)
