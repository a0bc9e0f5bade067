"""Steps whose plan keeps stages in fewer bits: how far their gradients are from exact ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rotor_py.checkpointable import Checkpointable
from rotor_py.stage.keepers.fewer_bits import rounded_stages
from rotor_py.trials.outcome import Outcome, difference


@dataclass(frozen=True, slots=True)
class Rounded:
    """What a step showed whose plan keeps stages in the fewer bits that `word` asks for (`keep=`)."""

    word: str
    gradient_error: float
    """The length of the difference of all gradients, as a part of the length of those of the plain step. (Of parameters
    after the step, where they are stepped in the backward.)"""
    buffer_difference: float
    """The largest absolute difference of a buffer, which the forward alone changes."""
    noise: float = 0.0
    """By how much two plain steps differ."""

    def problem(self) -> str | None:
        """What is wrong beyond that gradients differ, in words; None if nothing is."""
        if not math.isfinite(self.gradient_error):
            return f"gradients of stages that are kept in {self.word} are not finite, and those of plain training are"
        if not self.buffer_difference <= 4 * self.noise:
            return f"buffers differ from plain training by up to {self.buffer_difference:g}, and the forward is exact"
        return None


def rounded_beside(found: Outcome, plain: Outcome, noise: float, word: str) -> Rounded:
    """What a step with the plan showed beside a plain one; two of these differ by `noise`."""
    count = len(plain.results) - plain.buffers
    exact = torch.stack([each.double().norm() for each in plain.results[:count]]).norm()
    pairs = zip(found.results[:count], plain.results[:count], strict=True)
    apart = torch.stack([(one.double() - other.double()).norm() for one, other in pairs]).norm()
    error = 0.0 if not apart else float(apart / exact)
    return Rounded(word, error, difference(found.results[count:], plain.results[count:]), noise)


def word_of_plan(network: Checkpointable) -> str | None:
    """The word for the fewer bits in which the plan keeps stages; None if it keeps none in fewer."""
    assert network.chain is not None
    assert network.sequence is not None
    assert network.inspection_values is not None
    kept = rounded_stages(network.chain, network.sequence)
    return network.inspection_values.fewer_bits if kept else None
