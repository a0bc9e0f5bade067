"""How checkpoints are kept in fewer bits, by the sequences that ask for it (`CF_3~`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rotor_py.stage.keepers.fewer_bits import FEWER_BITS
from rotor_py.stage.keepers.rounded_value import RoundedValue

_log = logging.getLogger("rotor_py")


class Rounding:
    """Rounds the inputs of stages as `word` (`keep=`) says: of each stage's, the tensors at these `positions`."""

    def __init__(self, word: str, positions: Mapping[int, tuple[int, ...]]) -> None:
        self.word = word
        self.positions = positions
        self._told = False

    def rounded(self, stage: int, name: str, value: Any) -> RoundedValue:
        """`value`, the input of a stage, in fewer bits.

        A tensor with numbers that are not finite stays as it is, which takes memory that no plan counts on: the first
        time, a warning is logged.
        """
        found = RoundedValue(value, self.positions[stage], FEWER_BITS[self.word])
        if not found.complete and not self._told:
            self._told = True
            _log.warning(
                "the input of stage %r has numbers that are not finite, or would not be in %s, so that it is kept "
                "whole: this step may take more memory than planned",
                name, self.word,
            )  # fmt: skip
        return found
