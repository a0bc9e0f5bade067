"""What is read of torch's files without importing it is what torch has."""

from __future__ import annotations

import inspect

import pytest
import torch

from rotor_cli import option_values
from rotor_cli.option_values import optimizer_and_options, shape_of

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
CLASSES = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
}


def can_be_filled(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(2, dtype=dtype)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.filterwarnings("ignore")  # of kinds that are experimental, or deprecated
def test_every_dtype_that_a_sample_can_have_is_known() -> None:
    assert {name for name, dtype in DTYPES.items() if can_be_filled(dtype)} <= option_values.dtypes()
    assert {"int46", "float", "nn"} & option_values.dtypes() == {"float"}


def test_floating_dtypes_are_those_of_torch() -> None:
    assert option_values.floating_dtypes() == {name for name, dtype in DTYPES.items() if dtype.is_floating_point}


def test_optimizers_and_what_they_take_are_those_of_torch() -> None:
    assert option_values.optimizers().keys() == CLASSES.keys()
    for name, made in CLASSES.items():
        assert option_values.arguments_of(name) == {"self", *inspect.signature(made).parameters}


@pytest.mark.parametrize("text", ["", "class Adam(:", "x = 1"])
def test_files_of_another_form_refuse_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = (option_values.dtypes, option_values.optimizers)
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(option_values, "_text", lambda file: text)
    try:
        assert not option_values.dtypes()
        assert not option_values.optimizers()
        assert shape_of("2,3:int46") == ([2, 3], "int46")
        monkeypatch.setattr(option_values, "optimizers", lambda: {"adam": ("optim/adam.py", "Adam")})
        assert optimizer_and_options("adam-fused", ["adam"], option_values.arguments_of) == ("adam", {"fused": True})
    finally:
        for each in caches:
            each.cache_clear()
