"""What a sequence keeps in fewer bits: of stages, what their backwards need; and inputs of stages, as checkpoints."""

from __future__ import annotations

from rotor_py.stage.keepers.fewer_bits import word_of
from rotor_solver import Chain, ForwardCheck, ForwardEnable, Sequence


def rounded_stages(chain: Chain, sequence: Sequence) -> dict[int, str]:
    """The stages that `sequence` keeps in fewer bits at any time, with the word that asks for it (`keep=`)."""
    found = {}
    for operation in (each for one in (sequence, *sequence.beside) for each in one):
        if isinstance(operation, ForwardEnable):
            word = word_of([chain.stages[operation.stage].options[operation.option].name])
            if word is not None:
                found[operation.stage] = word
    return found


def rounded_checkpoints(sequence: Sequence) -> frozenset[int]:
    """The stages whose inputs `sequence` keeps in fewer bits at any time, to run them again from there."""
    operations = (each for one in (sequence, *sequence.beside) for each in one)
    return frozenset(each.stage for each in operations if isinstance(each, ForwardCheck) and each.rounded)
