"""Ranges of a file: nobody has the same bytes, and what is given back is used again."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_py.offload.file_space import ALIGNMENT, Extent, FileSpace


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_no_byte_has_two_owners_and_all_come_back(seed: int) -> None:
    rng, space, mine = random.Random(seed), FileSpace(), []
    for _ in range(60):
        if mine and rng.random() < 0.45:
            space.give_back(mine.pop(rng.randrange(len(mine))))
        else:
            nbytes = rng.randint(1, 5 * ALIGNMENT)
            mine.append(space.take(nbytes))
            assert mine[-1].size >= nbytes
        assert all(one.end <= other.start for one, other in pairwise(sorted(mine)))
        assert space.end >= max((each.end for each in mine), default=0)
        assert space.taken == sum(each.size for each in mine)
    for each in mine:
        space.give_back(each)
    assert (space.end, space.taken) == (0, 0)


def test_the_second_step_lies_where_the_first_one_did() -> None:
    space = FileSpace()

    def step() -> list[Extent]:
        taken = [space.take(size) for size in (9000, 4096, 20000, 1)]
        for each in reversed(taken):
            space.give_back(each)
        return taken

    first = step()
    assert step() == first
    assert [each.start for each in first] == [0, 3 * ALIGNMENT, 4 * ALIGNMENT, 9 * ALIGNMENT]
