"""The kinds of what is kept of a stage: each has a colour and words of its own in tables and pictures."""

from __future__ import annotations

from rotor_py.stage.keepers.fewer_bits import word_of
from rotor_py.stage.keepers.packed import Packed
from rotor_py.stage.ways.names import parted
from rotor_solver import Stage

WORDS = {
    "kept": "all that the backward needs",
    "part": "a part of it, the rest is made again",
    "packed": "packed, with the same bits",
    "rounded": "rounded to fewer bits",
    "elsewhere": "what stays of it while the rest is elsewhere",
    "input": "its input alone",
}
"""What is in memory, by kind."""


def kept_kind(stage: Stage, option: int) -> str:
    """The kind of what an option of a stage keeps.

    A part may be packed or rounded as well: then it counts as that, which is what the user has to know first.
    """
    way = stage.options[option]
    if way.moved:
        return "elsewhere"
    if word_of([way.name]) is not None:
        return "rounded"
    if parted(way.name, (Packed().name,))[1] is not None:
        return "packed"
    return "part" if option else "kept"
