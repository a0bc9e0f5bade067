"""A captured model of transformers runs the attention that it runs eagerly, whatever its batch masks."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_py import Checkpointable, InfeasibleError, PlanMismatchError
from rotor_py.capture import captured_graph
from rotor_py.capture.graph.graph_stage import GraphStage
from rotor_py.plan.settings import Settings
from rotor_py.plan.step_plans import StepPlans
from rotor_py.plan.step_spec import ModelState, StepSpec, spec_of
from rotor_py.plan.trained_model import TrainedModel
from tests.capture.steps import assert_same_gradients as assert_same
from tests.capture.steps import planned_for
from tests.checkpointable.steps import Made
from tests.fields import logged, raises

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
Batch = dict[str, torch.Tensor]


def llama(kind: str = "Llama", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **heads, **settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def words(*, mask: bool = False, padded: bool = False, length: int = 16) -> Batch:
    ids = torch.randint(3, 50, (3, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if mask or padded:
        batch["attention_mask"] = torch.ones_like(ids)
    if padded:
        batch["attention_mask"][1, length // 2 :] = 0
    return batch


def attentions(planned: Checkpointable) -> Iterator[fx.Node]:
    for stage in (each for function in planned.functions for each in function.modules()):
        if isinstance(stage, GraphStage):
            yield from (node for node in stage.body.graph.nodes if "scaled_dot_product" in str(node.target))


def gradients(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    off = {} if isinstance(model, Checkpointable) else {"use_cache": False}  # with a plan it is off anyway
    model(**batch, **off).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same_gradients(planned: Checkpointable, plain: nn.Module, batch: Batch) -> None:
    found, expected = gradients(planned, batch), gradients(plain.train(), batch)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


PACKED = {**words(), "position_ids": torch.arange(16).remainder(8).expand(3, 16).contiguous()}


def test_a_graph_whose_answers_are_wrong_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, stages_of = [], captured_graph.stages_of
    monkeypatch.setattr(captured_graph, "stages_of", lambda *given: cut.append(given) or stages_of(*given))
    Checkpointable(llama(), words(padded=True), cache=False)
    assert len(cut) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "batch", "masked"),
    [
        (llama, PACKED, True),
        (lambda: llama("Mistral"), words(mask=True), False),
        (lambda: llama("Mistral", sliding_window=4), words(), True),
    ],
)
def test_gradients_are_eager_ones_and_a_decoder_without_a_mask_has_the_fast_attention(make, batch, masked) -> None:
    planned = planned_for(model := make(), batch, loss=None)
    found = list(attentions(planned))
    assert [node.kwargs["attn_mask"] is not None for node in found] == [masked]
    if not masked:
        assert [(node.kwargs["is_causal"], node.kwargs["enable_gqa"]) for node in found] == [(True, True)]
    assert_same_gradients(planned, model, batch)


def test_padded_batches_have_a_plan_of_their_own_that_also_serves_smaller_ones(caplog: Any) -> None:
    functions = "prepare_padding_mask", "find_packed_sequence_indices"
    before = [getattr(masking_utils, name) for name in functions]
    planned = Checkpointable(model := llama(), words(mask=True), mem_limit="1GB")
    for length in (16, 8):
        for padded in (False, True):
            assert_same_gradients(planned, model, words(mask=True, padded=padded, length=length))
            assert all((node.kwargs["attn_mask"] is not None) == padded for node in attentions(planned))
    assert len(logged(caplog, "planning_again")) == 1
    assert logged(caplog, "planning_again", cause="mask")
    assert not logged(caplog, "unplanned_graph")
    with pytest.raises(IndexError):
        planned(**{**words(mask=True), "input_ids": torch.full((3, 16), 99)})
    assert [getattr(masking_utils, name) for name in functions] == before, "the library is as it was"


@pytest.mark.slow
def test_an_encoder_and_a_decoder_are_masked_each_by_its_own_batch() -> None:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = transformers.BartConfig(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, **heads)
    planned = Checkpointable(model := transformers.BartForConditionalGeneration(config), mem_limit="1GB")
    half = words(padded=True)["attention_mask"]
    for mask, other in ((half, None), (torch.ones_like(half), half)):
        masks = {"attention_mask": mask, "decoder_attention_mask": other}
        batch = {**words(), **{name: each for name, each in masks.items() if each is not None}}
        assert_same_gradients(planned, model, batch)


@pytest.mark.slow
def test_a_plan_from_a_file_refuses_batches_that_are_masked_otherwise(tmp_path: Path) -> None:
    model = llama()
    Checkpointable(model, words(mask=True), mem_limit="1GB").save_plan(tmp_path / "plan.json")
    again = Checkpointable(copy.deepcopy(model), plan=tmp_path / "plan.json")
    assert_same_gradients(again, model, words(mask=True))
    with raises(PlanMismatchError, "plan_for_other_model", name="what the model asks about its data"):
        again(**words(padded=True))


@pytest.mark.slow
def test_one_of_several_processes_asks_nothing_about_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each has another batch, and all have to run the same stages.
    batches = [words(padded=True), words(mask=True)]
    with monkeypatch.context() as several:
        several.setattr(captured_graph, "several_processes", lambda: True)
        assert all(node.kwargs["is_causal"] for node in attentions(Checkpointable(llama(), words())))
        planned = Checkpointable(model := llama(), batches[0], mem_limit="1GB")
        assert all(node.kwargs["attn_mask"] is not None for node in attentions(planned))
        for batch in batches:
            for one, two in zip(gradients(planned, batch), gradients(model.train(), batch), strict=True):
                torch.testing.assert_close(one, two)
    # The graph that was captured then asks again in a single process.
    planned = Checkpointable(model := llama(), batches[0], mem_limit="1GB")
    for batch in batches:
        assert_same_gradients(planned, model, batch)
        assert all((node.kwargs["attn_mask"] is not None) == (batch is batches[0]) for node in attentions(planned))


class Broken(Made):
    """A model whose graph breaks after the mask was asked about; the second graph keeps most."""

    def forward(self, use_cache: bool = False, **batch: torch.Tensor) -> Any:
        output = self.model(**batch, use_cache=False)
        torch._dynamo.graph_break()
        logits = torch.cat([output.logits] * 6)
        output.loss = output.loss + self.head(logits).square().mean()
        return output


@pytest.mark.slow
def test_where_the_first_graph_asks_and_another_is_planned_plans_wait_as_well(caplog: Any) -> None:
    head = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(50, 50), nn.Tanh(), nn.Tanh())))
    model = Broken(model=(inner := llama()), config=inner.config, head=head)
    planned = Checkpointable(model, words(mask=True), mem_limit="1GB")
    assert not list(attentions(planned))
    for padded in (False, True, True, False):
        assert_same_gradients(planned, model, words(mask=True, padded=padded))
    # After a break, the first forward that comes to another graph goes on as it is.
    assert [len(logged(caplog, kind)) for kind in ("unplanned_graph", "planning_again")] == [1, 1]


def test_a_batch_with_padding_that_was_refused_says_nothing_of_one_without() -> None:
    model, error = llama(), InfeasibleError("no plan", min_bytes=200, mem_limit=100)
    spec = StepSpec(ModelState.of(model), spec_of(((), words())))
    answers: list[tuple[bool, ...] | None] = [None, (), (True,), (False,)]
    for refused in answers:
        plans = StepPlans(TrainedModel(model, model, Settings(mem_limit=100)))
        plans._remember_refused(replace(spec, answers=refused), error)
        for asked in answers:
            fails = nullcontext() if refused == (False,) != asked else pytest.raises(InfeasibleError)
            with fails:
                plans._raise_if_refused(replace(spec, answers=asked))


class Products(TorchDispatchMode):
    """Counts products of several experts at once, and those that come one by one."""

    at_once = one_by_one = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.at_once += "grouped_mm" in str(func) and "fallback" not in str(func)
        self.one_by_one += "grouped_mm_fallback" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_experts_are_multiplied_at_once_and_gradients_are_those_of_plain_training() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    if not hasattr(moe, "_grouped_mm"):
        pytest.skip("this version multiplies experts otherwise")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads, experts_implementation="grouped_mm")
    torch.manual_seed(0)
    plain = transformers.MixtralForCausalLM(config).train()
    twin, tokens = copy.deepcopy(plain), torch.randint(64, (4, 32))
    inputs = {"input_ids": tokens, "labels": tokens}
    with Products() as expected:
        plain(**inputs).loss.backward()
    assert expected.at_once > 0
    planned = planned_for(twin, inputs, lambda output: output.loss, cache=False)
    planned.zero_grad()
    with Products() as found:
        planned(**inputs).loss.backward()
    assert found.one_by_one == 0
    assert found.at_once > expected.at_once, "some stages are recomputed"
    assert_same(twin, plain)
