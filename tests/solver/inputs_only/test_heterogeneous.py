"""The best schedules that store inputs, alone or with what their stages save, against a slow twin."""

from __future__ import annotations

import math
import random
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, simulate, store_all
from rotor_solver.inputs_only.heterogeneous import GriewankHeterogeneous
from rotor_solver.inputs_only.revolve import Revolve, forward_steps
from tests.solver.classical import forwards, least_limit, limits, makespan, stores_only_inputs
from tests.solver.naive import Columns, naive_optimum
from tests.solver.strategies import plain_chains, rich_chains, unit_chain

BOTH = pytest.mark.parametrize("attached", [False, True], ids=["inputs", "attached"])


def naive_heterogeneous(chain: Chain, limit: int, attached: bool) -> float:
    """The recurrence as a memoised recursion in bytes; infinite where nothing fits."""
    length, columns = len(chain), Columns(chain)
    sizes, left = (*columns.activation, 0), columns.gradients_from
    options = [min(each.options, key=lambda o: (o.forward_time + o.backward_time, o.saved)) for each in chain]

    @cache
    def best(i: int, last: int, memory: int, inside: bool, enable: bool) -> float:
        """`inside` says that a_i lies in an ā_i, `enable` that [i, last] has to begin with Fe_i."""
        if i == length:
            return chain.loss_time if memory >= sizes[length] + chain.loss_temp else math.inf
        option, lost, freed = options[i], last < length, columns.released[i][inside]
        held = sizes[length] if chain.output_held else 0
        others = sizes[last + 1] + left[min(last + 1, length)] + held * lost
        times = [math.inf]
        if attached or i == last or (i, last) == (length - 1, length):
            temp = option.backward_temp_of_replay if lost else option.backward_temp
            during = sizes[i] + sizes[i + 1] + left[i + 1] + option.saved + temp
            during += held * (lost or i < length - 1)
            after = left[i] + held
            if memory >= max(others + option.saved + option.forward_temp, max(during, after) - freed):
                rest = best(i + 1, last, memory + freed - option.saved, True, False) if i < last else 0.0
                skipped = columns.skipped_output_time[i] if lost and i == last else 0.0
                times.append(option.forward_time - skipped + option.backward_time + rest)
        for j in range(i + 1, last + 1) if not enable else ():
            most = max((sizes[k] if k > i else 0) + sizes[k + 1] + columns.nograd_temp[k] for k in range(i, j))
            if memory >= others + most:
                rest = best(j, last, memory - sizes[j], False, attached and j < length)
                times.append(sum(columns.nograd_time[i:j]) + rest + best(i, j - 1, memory, inside, False))
        return min(times)

    return best(0, length, limit - sizes[0], False, False)


@BOTH
@settings(max_examples=25, deadline=None)
@given(chain=rich_chains() | plain_chains(), data=st.data())
def test_schedules_are_as_fast_as_the_recurrence_says(attached: bool, chain: Chain, data: st.DataObject) -> None:
    limit = data.draw(limits(chain), label="limit")
    found = makespan(GriewankHeterogeneous(attached=attached), chain, limit)
    assert found == naive_heterogeneous(chain, limit, attached)
    assert found >= naive_optimum(chain, limit)


@BOTH
@settings(max_examples=60, deadline=None)
@given(chain=rich_chains())
def test_the_least_limit_is_exact(attached: bool, chain: Chain) -> None:
    least = least_limit(GriewankHeterogeneous(attached=attached), chain)
    assert math.isfinite(naive_heterogeneous(chain, least, attached))
    assert math.isinf(naive_heterogeneous(chain, least - 1, attached))


@BOTH
@settings(max_examples=60, deadline=None)
@given(chain=rich_chains(max_stages=7), slots=st.integers(1, 12), data=st.data())
def test_coarse_slots_never_break_the_limit(attached: bool, chain: Chain, slots: int, data: st.DataObject) -> None:
    limit = data.draw(limits(chain), label="limit")
    best = naive_heterogeneous(chain, limit, attached)
    found = makespan(GriewankHeterogeneous(slots, attached), chain, limit)
    assert best <= found
    assert math.isinf(best) == math.isinf(found)


@BOTH
def test_scratch_of_forwards_without_a_graph_counts_beside_gradients(attached: bool) -> None:
    """Chains in which little else decides; hypothesis seldom finds them."""
    draw = random.Random(3)

    def several(most: int, count: int) -> list[int]:
        return [draw.randint(0, most) for _ in range(count)]

    for _ in range(200):
        length = draw.randint(3, 5)
        activation = several(6, length + 1)
        chain = Chain.from_arrays(
            several(5, length),
            several(5, length + 1),
            activation,
            [size + draw.randint(0, 3) for size in activation[1:]],
            several(3, length),
            several(3, length + 1),
            nograd_temp=draw.choices([0, 0, 12], k=length),
        )
        algorithm = GriewankHeterogeneous(attached=attached)
        least = least_limit(algorithm, chain)
        assert math.isinf(naive_heterogeneous(chain, least - 1, attached))
        for limit in range(least, least + 4):
            assert makespan(algorithm, chain, limit) == naive_heterogeneous(chain, limit, attached)


@BOTH
@pytest.mark.parametrize("length", [1, 5, 40])
def test_all_cores_find_what_one_finds(attached: bool, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(7919 * k * k) % 1_000_003 for k in range(1, length + 2)]
    times = [float(k % 7 + 1) for k in range(length)]
    saved = [2 * size for size in sizes[1:]]
    chain = Chain.from_arrays(times, [*times, 0.0], sizes, saved, [5] * length, [7] * (length + 1))
    algorithm = GriewankHeterogeneous(attached=attached)
    least = least_limit(algorithm, chain)
    within = (least, least + least // 3, 2 * least)
    alone = [algorithm.solve(chain, limit) for limit in within]
    monkeypatch.setattr("rotor_solver.inputs_only.heterogeneous._SERIAL", 0)
    assert [algorithm.solve(chain, limit) for limit in within] == alone


@BOTH
def test_sizes_in_real_bytes(attached: bool) -> None:
    sizes = [(7919 * k * k) % 1_000_003 for k in range(1, 14)]
    chain = Chain.from_arrays([1.0] * 12, [2.0] * 13, sizes, [3 * size for size in sizes[1:]], [5] * 12, [7] * 13)
    least = least_limit(GriewankHeterogeneous(attached=attached), chain)
    for limit in range(least, 2 * least, least // 4):
        best = naive_heterogeneous(chain, limit, attached)
        assert best <= makespan(GriewankHeterogeneous(attached=attached), chain, limit) <= 1.05 * best


@settings(max_examples=60, deadline=None)
@given(rich_chains(), st.data())
def test_only_inputs_are_stored_and_revolve_is_not_better(chain: Chain, data: st.DataObject) -> None:
    limit = data.draw(limits(chain), label="limit")
    found = makespan(GriewankHeterogeneous(), chain, limit)
    assert found <= makespan(Revolve(), chain, limit)
    if math.isfinite(found):
        assert stores_only_inputs(GriewankHeterogeneous().solve(chain, limit))


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 10])
def test_where_stages_are_alike_it_is_revolve(snapshots: int) -> None:
    for steps in (1, 2, 10, 29, 50, 100):
        sequence = GriewankHeterogeneous().solve(unit_chain(steps), snapshots + 4)
        assert forwards(sequence) == forward_steps(steps, snapshots)


def test_schedules_that_can_be_checked_by_hand() -> None:
    chain = unit_chain(4)
    assert str(GriewankHeterogeneous().solve(chain, 7)) == (
        "CF_0, CF_1, CF_2, Fe_3, L, B_3, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0"
    )
    # at B_3: a_0, ā_1 with a_1 inside, a_3, ā_4, δ_4, δ_3
    sequence = GriewankHeterogeneous(attached=True).solve(chain, 6)
    assert str(sequence) == "Fe_0, CF_1, Fn_2, Fe_3, L, B_3, Fe_1, Fe_2, B_2, B_1, B_0"
    assert simulate(chain, sequence).peak == 6
    assert GriewankHeterogeneous(attached=True).solve(chain, 7) == store_all(chain)


def test_chains_of_one_stage_and_of_none() -> None:
    for attached in (False, True):
        assert str(GriewankHeterogeneous(attached=attached).solve(unit_chain(0), 2)) == "L"
        assert str(GriewankHeterogeneous(attached=attached).solve(unit_chain(1), 4)) == "Fe_0, L, B_0"


def test_names() -> None:
    assert GriewankHeterogeneous().name == "griewank-heterogeneous"
    assert GriewankHeterogeneous(attached=True).name == "griewank-heterogeneous-attached"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 0}, "slots is 0; memory has to be divided into at least one slot"),
        ({"slots": 2.5}, "slots is 2.5"),
        ({"slots": True}, "slots is True"),
        ({"attached": 1}, "attached is 1; it has to be True or False"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GriewankHeterogeneous(**fields)
