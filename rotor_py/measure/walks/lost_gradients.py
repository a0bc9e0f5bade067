"""Gradients that a stage would lose where it is run again: those of what is not its own, found by its first run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_profiling.attributes import Attributes, with_gradients
from rotor_py.errors import UnsupportedModelError, record_fields
from rotor_py.stage.attached_stage import edges_of, leaves_behind

_log = logging.getLogger("rotor_py")


class LostGradients:
    """Looks at what the stage `function` makes in a run that begins from now on."""

    def __init__(self, name: str, function: nn.Module) -> None:
        self._name, self._function = name, function
        self._attributes = Attributes(function)

    def refuse(self, value: Any, output: Any, parameters: Sequence[torch.Tensor]) -> None:
        """UnsupportedModelError if the stage uses a parameter of a layer that it only refers to, in a list for example.

        `output` is what it has made of `value`, in its graph; `parameters` are those that it trains. Where it is run
        again, its graph ends at its own parameters, and that one would get no gradient. A warning says so where an
        attribute keeps a tensor with a gradient.
        """
        if kept := with_gradients(self._attributes.changes()):
            self._warn(kept[0])
        known = {id(tensor) for tensor in (*tensors_in(value), *parameters)}
        lost = [each for each in leaves_behind(edges_of(output)) if id(each) not in known]
        if lost:
            raise UnsupportedModelError(
                f"stage {self._name!r} ({type(self._function).__name__}) uses a parameter of shape "
                f"{tuple(lost[0].shape)} that is not its own, and would get no gradient there when the stage is run "
                "again; make the module that has it a submodule of the stage (an attribute, or in an nn.ModuleList)",
                kind="foreign_parameter",
                name=self._name,
            )

    def _warn(self, attribute: str) -> None:
        """What is computed from such an attribute has no graph at first where the stage runs again."""
        _log.warning(
            "stage %r (%s) keeps a tensor with a gradient in its attribute %r. Where a plan runs the stage again, the "
            "one that is there after the forward has none: a loss that reads it trains nothing through it. Return it "
            "from the stage, or give a model that is no nn.Sequential, whose graph is captured.",
            self._name, type(self._function).__name__, attribute,
            extra=record_fields("kept_in_attribute", name=self._name, attribute=attribute),
        )  # fmt: skip
