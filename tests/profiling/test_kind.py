"""Which stages are of one kind, and so measured once."""

from __future__ import annotations

import torch
from torch import nn

from rotor_profiling import stage_kind


def kind(stage: nn.Module, value: object = None):
    return stage_kind(stage, torch.zeros(2, 8) if value is None else value)


def block(width: int = 8, p: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(p), nn.BatchNorm1d(width))


def test_blocks_that_differ_only_in_their_numbers_are_of_one_kind() -> None:
    assert kind(block()) == kind(block())


def test_what_makes_another_kind() -> None:
    usual = kind(block())
    frozen, evaluated, hooked, half = block(), block(), block(), block().half()
    frozen[0].weight.requires_grad_(False)
    evaluated[2].eval()
    hooked[0].register_forward_hook(lambda *_: None)
    others = [block(9), block(p=0.2), frozen, evaluated, hooked, half, nn.Sequential(*block(), nn.ReLU())]
    assert all(kind(other) != usual for other in others)


def test_inputs_matter_by_shape_strides_type_and_need_of_gradient() -> None:
    value = torch.zeros(4, 8)
    others = [
        torch.zeros(5, 8),
        torch.zeros(8, 4).t(),
        torch.zeros(4, 8).double(),
        torch.zeros(4, 8, requires_grad=True),
        (value,),
        {"x": value},
        (value, 3),
    ]
    kinds = [kind(block(), each) for each in (value, *others)]
    assert len(set(kinds)) == len(kinds)
    assert kind(block(), torch.ones(4, 8)) == kinds[0]
    assert kind(block(), (value, 3)) != kind(block(), (value, 4))


def test_functions_are_kinds_of_their_own() -> None:
    assert stage_kind(torch.relu, torch.zeros(1)) == stage_kind(torch.relu, torch.zeros(1))
    assert stage_kind(lambda x: x, torch.zeros(1)) != stage_kind(lambda x: x, torch.zeros(1))
