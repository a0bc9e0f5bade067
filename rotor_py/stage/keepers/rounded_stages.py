"""Which stages a sequence keeps in fewer bits."""

from __future__ import annotations

from rotor_py.stage.keepers.fewer_bits import word_of
from rotor_solver import Chain, ForwardEnable, Sequence


def rounded_stages(chain: Chain, sequence: Sequence) -> dict[int, str]:
    """The stages that `sequence` keeps in fewer bits at any time, with the word that asks for it (`keep=`)."""
    found = {}
    for operation in (each for one in (sequence, *sequence.beside) for each in one):
        if isinstance(operation, ForwardEnable):
            word = word_of([chain.stages[operation.stage].options[operation.option].name])
            if word is not None:
                found[operation.stage] = word
    return found
