"""Models of transformers by their class: made from a configuration, with random weights, and an input for them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from rotor_cli.errors import usage
from rotor_cli.loading.values import configuration

_LENGTH = 128
"""Words in a text of the usual size. A guess."""


def configuration_class(found: Any) -> Any:
    """The class of the configuration of a class of models; None for anything else."""
    return getattr(found, "config_class", None) if isinstance(found, type) and issubclass(found, nn.Module) else None


def make(model_class: Any, config_class: Any, config: str | None) -> nn.Module:
    """A model with random weights; `config` is JSON, or a file of it."""
    made: nn.Module = model_class(config_class(**configuration(config)))
    return made


def example_of(model: Any, given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Keyword arguments for a training step: `given` as the main input, or one of the usual size, and labels."""
    accepted = inspect.signature(model.forward).parameters
    name = model.main_input_name
    if given is None:
        if name != "input_ids":
            raise usage(f"the input of {type(model).__name__} is {name!r}; say its shape, as in --input 8,3,224,224")
        given = torch.zeros(8, _LENGTH, dtype=torch.int64)
    sample = {name: given}
    vocabulary = getattr(model.config, "vocab_size", None)
    if name == "input_ids" and vocabulary:
        sample[name] = torch.randint(int(vocabulary), tuple(given.shape))
    if "labels" in accepted:
        # The label of a language model is the text itself; that of a classification is one number for each sample.
        words = name == "input_ids" and "Classification" not in type(model).__name__
        sample["labels"] = sample[name].clone() if words else torch.zeros(len(given), dtype=torch.int64)
    return sample
