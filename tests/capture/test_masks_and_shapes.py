"""Batches that differ both in what they mask and in their shapes: a plan for each kind of mask serves all that fit."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError
from rotor_py.plan.settings import Settings
from rotor_py.plan.step_plans import StepPlans
from rotor_py.plan.step_spec import ModelState, StepSpec, spec_of
from rotor_py.plan.trained_model import TrainedModel
from tests.capture.test_masks import assert_same_gradients, attentions, llama, words
from tests.fields import logged

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it


@pytest.mark.slow
def test_smaller_batches_use_the_plan_for_their_mask_at_once(caplog: Any) -> None:
    model = llama()
    planned = Checkpointable(model, words(mask=True), mem_limit="1GB")
    with caplog.at_level(logging.WARNING, "rotor_py"):
        assert_same_gradients(planned, model, words(mask=True, padded=True))
        caplog.clear()
        for length in (16, 12, 8):
            for padded in (False, True):
                assert_same_gradients(planned, model, words(mask=True, padded=padded, length=length))
                assert all((node.kwargs["attn_mask"] is not None) == padded for node in attentions(planned))
    assert not logged(caplog, "planning_again")
    assert not logged(caplog, "captured_again")


@pytest.mark.slow
def test_a_larger_batch_that_is_masked_otherwise_replaces_the_plan_for_its_mask_alone(caplog: Any) -> None:
    model = llama()
    planned = Checkpointable(model, words(mask=True), mem_limit="1GB")
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for length in (16, 24):
            assert_same_gradients(planned, model, words(padded=True, length=length))
        caplog.clear()
        for padded, length in ((False, 16), (True, 24), (False, 12), (True, 16)):
            assert_same_gradients(planned, model, words(mask=True, padded=padded, length=length))
    assert not logged(caplog, "planning_again")


class Short(nn.Module):
    """A model that does something else with short texts, padded or not."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.config = self.model.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **rest: Any) -> Any:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)
        if input_ids.shape[1] < 10:
            output.loss = output.loss + output.logits.exp().logsumexp(2).mean()
        return output


@pytest.mark.slow
def test_every_way_by_mask_and_shape_is_planned_for_once(caplog: Any) -> None:
    model = Short()
    planned = Checkpointable(model, words(mask=True), mem_limit="1GB")
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for _ in range(2):
            for padded, length in ((False, 16), (True, 16), (False, 8), (True, 8)):
                assert_same_gradients(planned, model, words(mask=True, padded=padded, length=length))
    assert len(logged(caplog, "planning_again")) == 3


class Broken(nn.Module):
    """A model whose graph breaks after the mask was asked about; the second graph keeps most."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.config = self.model.config
        self.head = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(50, 50), nn.Tanh(), nn.Tanh())))

    def forward(self, use_cache: bool = False, **batch: torch.Tensor) -> Any:
        output = self.model(**batch, use_cache=False)
        torch._dynamo.graph_break()
        logits = torch.cat([output.logits] * 6)
        output.loss = output.loss + self.head(logits).square().mean()
        return output


@pytest.mark.slow
def test_where_the_first_graph_asks_and_another_is_planned_plans_wait_as_well(caplog: Any) -> None:
    model = Broken()
    planned = Checkpointable(model, words(mask=True), mem_limit="1GB")
    assert not list(attentions(planned))
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for padded in (False, True, False, True):
            assert_same_gradients(planned, model, words(mask=True, padded=padded))
    assert len(logged(caplog, "planning_again")) == 1


def test_a_batch_with_padding_that_was_refused_says_nothing_of_one_without() -> None:
    model, error = llama(), InfeasibleError("no plan", min_bytes=200, mem_limit=100)
    spec = StepSpec(ModelState.of(model), spec_of(((), words())))
    answers: list[tuple[bool, ...] | None] = [None, (), (True,), (False,)]
    for refused in answers:
        plans = StepPlans(TrainedModel(model, model, Settings(mem_limit=100)))
        plans._remember_refused(replace(spec, answers=refused), error)
        for asked in answers:
            if refused == (False,) != asked:
                plans._raise_if_refused(replace(spec, answers=asked))
            else:
                with pytest.raises(InfeasibleError):
                    plans._raise_if_refused(replace(spec, answers=asked))
