"""Which stages are of one kind, and so measured once."""

from collections.abc import Hashable

import torch
from torch import nn

from rotor_profiling import isolated, stage_signature, value_signature
from rotor_profiling.stage.stage_signature import HasKind


def kind(stage: object, value: object = None):
    return stage_signature(stage, torch.zeros(2, 8) if value is None else value)


def block(width: int = 8, p: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(p), nn.BatchNorm1d(width))


def test_blocks_and_functions_are_of_one_kind_unless_more_than_their_numbers_differs() -> None:
    usual = kind(block())
    assert kind(block()) == usual
    frozen, evaluated, hooked = block(), block(), block()
    frozen[0].weight.requires_grad_(False)
    evaluated[2].eval()
    hooked[0].register_forward_hook(lambda *_: None)
    others = [block(9), block(p=0.2), frozen, evaluated, hooked, block().half(), nn.Sequential(*block(), nn.ReLU())]
    assert all(kind(other) != usual for other in others)
    assert kind(torch.relu) == kind(torch.relu)
    assert kind(lambda x: x) != kind(lambda x: x)


def test_inputs_matter_by_shape_strides_type_and_need_of_gradient() -> None:
    value = torch.zeros(4, 8)
    others = [torch.zeros(5, 8), torch.zeros(8, 4).t(), value.double(), torch.zeros(4, 8, requires_grad=True)]
    kinds = [kind(block(), each) for each in (value, *others, (value,), {"x": value}, (value, 3))]
    assert len(set(kinds)) == len(kinds)
    assert kind(block(), torch.ones(4, 8)) == kinds[0]
    assert kind(block(), (value, 3)) != kind(block(), (value, 4))


class Generated(nn.Module, HasKind):
    """Code that no two objects share, and that says what it does and what of its input it reads."""

    def __init__(self, does: str, reads: int = 0, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.code = object()
        self._does, self._reads = does, reads

    def kind(self, value: tuple[torch.Tensor, ...]) -> Hashable:
        return self._does, value_signature(value[self._reads])


def test_modules_that_define_their_kind_are_compared_by_it_and_by_their_parameters_also_where_joined() -> None:
    value = (torch.zeros(2), torch.zeros(3))

    def pair(second: str) -> nn.Module:
        return nn.Sequential(Generated("exp"), Generated(second, reads=1))

    assert kind(Generated("exp"), value) == kind(Generated("exp"), value)
    assert kind(Generated("exp"), value) == kind(Generated("exp"), (torch.zeros(2), torch.zeros(9)))
    others = [Generated("log"), Generated("exp", reads=1), Generated("exp", width=9), nn.Sequential(Generated("exp"))]
    assert all(kind(other, value) != kind(Generated("exp"), value) for other in others)
    assert kind(pair("log"), value) == kind(pair("log"), value)
    assert kind(pair("log"), value) != kind(pair("sin"), value)
    assert kind(pair("log"), value) != kind(pair("log"), (torch.zeros(2), torch.zeros(4)))


def test_recurrent_layers_that_look_alike_are_of_one_kind_before_and_after_they_have_run() -> None:
    value = torch.zeros(2, 3, 4)
    alike, other = [nn.LSTM(4, 5), nn.LSTM(4, 5)], nn.LSTM(4, 6)
    assert kind(alike[0], value) == kind(alike[1], value) != kind(other, value)
    with isolated(alike[0], torch.device("cpu")):
        alike[0](value)
    assert kind(alike[0], value) == kind(alike[1], value)
