"""Adapters of `peft` on a frozen model: no gradient is silently None, and every bit is that of plain training."""

import copy
from typing import Any

import pytest
import torch

from rotor_py import Checkpointable
from rotor_py.measure.budget import recomputes
from tests.checkpointable.steps import planned_at

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:.*pin_memory",
    "ignore:.*is_gradient_checkpointing",
)
ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
TOKENS = torch.randint(1, 96, (4, 40), generator=torch.Generator().manual_seed(1))
GIVEN = {"input_ids": TOKENS, "labels": TOKENS}


def adapted(kind: str = "LoRA") -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=96, num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), ADAPTERS[kind]())


def step(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor | None]]:
    torch.manual_seed(5)
    model.zero_grad()
    loss = model(**GIVEN).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_step(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    (loss, gradients), (wanted_loss, wanted) = step(found), step(expected)
    assert loss == wanted_loss
    assert list(gradients) == list(wanted)
    for name, parameter in expected.named_parameters():
        gradient, other = gradients[name], wanted[name]
        assert (gradient is not None) == (other is not None) == parameter.requires_grad, name
        assert gradient is None or torch.equal(gradient, other), name


@pytest.mark.parametrize("kind", ["LoRA", pytest.param("prefix", marks=pytest.mark.slow)])
def test_adapters_get_the_gradients_of_plain_training_and_what_is_frozen_gets_none(kind: str) -> None:
    plain = adapted(kind)
    planned = planned_at(0.0, copy.deepcopy(plain), GIVEN, loss=None)
    assert recomputes(planned.sequence) or kind == "prefix"  # cut into few stages, of which one is most
    assert_same_step(planned, plain)


@pytest.mark.slow
def test_the_step_follows_the_adapter_that_is_switched_on() -> None:
    plain = adapted()
    planned = Checkpointable(copy.deepcopy(plain), mem_limit="1GB")
    other: dict[str, Any] = {"target_modules": ["o_proj"], "r": 2, "init_lora_weights": False}
    assert_same_step(planned, plain)
    with planned.disable_adapter(), plain.disable_adapter(), torch.no_grad():
        assert torch.equal(planned(**GIVEN).logits, plain(**GIVEN).logits)
    for model in (planned, plain):
        torch.manual_seed(9)
        model.add_adapter("other", peft.LoraConfig(**other))
        model.set_adapter("other")
    assert_same_step(planned, plain)
    for model in (planned, plain):
        model.set_adapter("default")
    assert_same_step(planned, plain)
