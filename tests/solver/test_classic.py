"""Strategies of the literature: Revolve's closed form, distances, and the best schedule against a slow twin."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Algorithm, Chain, InfeasibleError, simulate, store_all
from rotor_solver.classic import GriewankHeterogeneous, Periodic, Revolve, Sqrt, forward_steps
from tests.fields import raises
from tests.solver.classical import forwards, least_limit, limits, makespan, stores_only_inputs
from tests.solver.naive import Columns, naive_optimum
from tests.solver.strategies import plain_chains, rich_chains, unit_chain

ROWS = json.loads((Path(__file__).resolve().parents[1] / "data" / "revolve.json").read_text())["rows"]
PLENTY = 10**6
COUNTS = st.none() | st.integers(1, 6)
ALGORITHMS = st.builds(Periodic, COUNTS, COUNTS) | st.just(Sqrt()) | st.builds(Revolve, COUNTS)
BOTH = pytest.mark.parametrize("attached", [False, True], ids=["inputs", "attached"])


@cache
def fewest(steps: int, snapshots: int) -> float:
    """Griewank & Walther's recurrence, forwards with a graph included."""
    if steps == 1:
        return 1
    if snapshots == 0:
        return math.inf
    return min(j + fewest(steps - j, snapshots - 1) + fewest(j, snapshots) for j in range(1, steps))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['n']}-{row['s']}")
def test_published_numbers_of_forwards(row: dict[str, int]) -> None:
    sequence = Revolve(row["s"]).solve(unit_chain(row["n"]), PLENTY)
    assert forwards(sequence) == forward_steps(row["n"], row["s"]) == row["closed_form_total"] == row["revolve_total"]


@pytest.mark.parametrize("snapshots", range(1, 14))
def test_no_schedule_has_fewer_forwards(snapshots: int) -> None:
    for steps in range(1, 60):
        sequence = Revolve(snapshots).solve(unit_chain(steps), PLENTY)
        assert stores_only_inputs(sequence)
        assert forwards(sequence) == forward_steps(steps, snapshots) == fewest(steps, snapshots)


def test_a_schedule_of_revolve_that_can_be_checked_by_hand() -> None:
    text = "CF_0, Fn_1, CF_2, Fe_3, L, B_3, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
    sequence = Revolve(2).solve(unit_chain(4), 6)
    assert str(sequence) == text
    # a_0, a_2, a_3, and ā_4, δ_4, δ_3 at B_3
    assert simulate(unit_chain(4), sequence).peak == 6


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 8])
def test_memory_is_the_snapshots_and_what_one_backward_needs(snapshots: int) -> None:
    assert least_limit(Revolve(snapshots), unit_chain(40)) == snapshots + 4
    assert Revolve().solve(unit_chain(40), snapshots + 4) == Revolve(snapshots).solve(unit_chain(40), PLENTY)


def test_steps_beyond_all_snapshots_and_none() -> None:
    assert forward_steps(0, 3) == 0
    assert str(Revolve().solve(unit_chain(0), 2)) == "L"
    assert str(Revolve(7).solve(unit_chain(1), 5)) == "Fe_0, L, B_0"
    assert forwards(Revolve(100).solve(unit_chain(5), PLENTY)) == 9


@settings(max_examples=60, deadline=None)
@given(rich_chains(), st.data())
def test_without_a_number_it_is_the_fastest_of_all_numbers_that_fit(chain: Chain, data: st.DataObject) -> None:
    limit = data.draw(limits(chain), label="limit")
    each = [makespan(Revolve(count), chain, limit) for count in range(1, len(chain) + 2)]
    assert makespan(Revolve(), chain, limit) == min(each)


def test_more_snapshots_may_need_less_memory_where_stages_differ() -> None:
    """a_2 and a_3 are large: with two snapshots a_2 is held at the wrong time, with three it is not."""
    peaks = []
    chain = Chain.from_arrays([1] * 5, [1] * 6, [1, 1, 9, 9, 1, 1], [1, 9, 9, 1, 1], [0] * 5, [0] * 6)
    for snapshots in range(1, 5):
        with pytest.raises(InfeasibleError) as caught:
            Revolve(snapshots).solve(chain, 0)
        peaks.append(caught.value.min_bytes)
    assert peaks == [37, 38, 37, 38]


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "3"])
def test_bad_numbers_of_snapshots_are_refused(bad: object) -> None:
    with raises(ValueError, "not_a_count", name="snapshots"):
        Revolve(bad)
    with raises(ValueError, "not_a_count", name="snapshots"):
        forward_steps(3, bad)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (Periodic(3), "CF_0, Fn_1, Fn_2, Fe_3, Fe_4, L, B_4, B_3, Fe_0, Fe_1, Fe_2, B_2, B_1, B_0"),
        (Periodic(2, 2), "CF_0, Fn_1, Fe_2, Fe_3, Fe_4, L, B_4, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
        (Sqrt(), "CF_0, Fn_1, Fe_2, Fe_3, Fe_4, L, B_4, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
        (Periodic(2), "CF_0, Fn_1, CF_2, Fn_3, Fe_4, L, B_4, Fe_2, Fe_3, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
    ],
)
def test_what_schedules_at_distances_look_like(algorithm: Algorithm, text: str) -> None:
    assert str(algorithm.solve(unit_chain(5), PLENTY)) == text


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 50, 100, 101])
def test_sqrt_runs_all_but_the_last_of_about_sqrt_segments_twice(length: int) -> None:
    chain, segments = unit_chain(length), round(math.sqrt(length))
    sequence = Sqrt().solve(chain, PLENTY)
    last = math.ceil(length / segments)
    assert forwards(sequence) == 2 * length - last
    # the other checkpoints, the segment, and at its last backward two gradients
    assert simulate(chain, sequence).peak <= segments + last + 3


def test_chains_of_one_stage_and_of_none() -> None:
    heterogeneous = (GriewankHeterogeneous(), GriewankHeterogeneous(attached=True))
    for algorithm in (Periodic(), Periodic(1), Periodic(1, 1), Sqrt(), *heterogeneous):
        assert str(algorithm.solve(unit_chain(0), 2)) == "L"
        assert str(algorithm.solve(unit_chain(1), 4)) == "Fe_0, L, B_0"


@settings(max_examples=75, deadline=None)
@given(rich_chains(max_stages=6), ALGORITHMS, st.data())
def test_the_limit_is_kept_and_the_optimum_not_beaten(chain: Chain, algorithm: Algorithm, data: st.DataObject) -> None:
    limit = data.draw(limits(chain), label="limit")
    assert makespan(algorithm, chain, limit) >= naive_optimum(chain, limit)


@settings(max_examples=60, deadline=None)
@given(rich_chains(max_stages=7), ALGORITHMS)
def test_the_least_limit_is_exact(chain: Chain, algorithm: Algorithm) -> None:
    least_limit(algorithm, chain)


@settings(max_examples=60, deadline=None)
@given(rich_chains(max_stages=6), COUNTS, st.data())
def test_without_a_distance_it_is_the_fastest_of_all_that_fit(
    chain: Chain, most: int | None, data: st.DataObject
) -> None:
    limit = data.draw(limits(chain), label="limit")
    each = [makespan(Periodic(n, most), chain, limit) for n in range(1, len(chain) + 2)]
    assert makespan(Periodic(max_checkpoints=most), chain, limit) == min(each)


@pytest.mark.parametrize("bad", [0, -3, False, 1.5, "2"])
def test_bad_distances_are_refused(bad: object) -> None:
    with raises(ValueError, "not_a_count", name="every"):
        Periodic(every=bad)
    with raises(ValueError, "not_a_count", name="max_checkpoints"):
        Periodic(max_checkpoints=bad)


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
def test_the_least_limit_of_the_best_schedule_is_exact(attached: bool, chain: Chain) -> None:
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

    for _ in range(60):
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


def test_best_schedules_that_can_be_checked_by_hand() -> None:
    chain = unit_chain(4)
    assert str(GriewankHeterogeneous().solve(chain, 7)) == (
        "CF_0, CF_1, CF_2, Fe_3, L, B_3, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0"
    )
    # at B_3: a_0, ā_1 with a_1 inside, a_3, ā_4, δ_4, δ_3
    sequence = GriewankHeterogeneous(attached=True).solve(chain, 6)
    assert str(sequence) == "Fe_0, CF_1, Fn_2, Fe_3, L, B_3, Fe_1, Fe_2, B_2, B_1, B_0"
    assert simulate(chain, sequence).peak == 6
    assert GriewankHeterogeneous(attached=True).solve(chain, 7) == store_all(chain)


@pytest.mark.parametrize(
    ("fields", "kind", "name"),
    [
        ({"slots": 0}, "not_a_count", "slots"),
        ({"slots": 2.5}, "not_a_count", "slots"),
        ({"slots": True}, "not_a_count", "slots"),
        ({"attached": 1}, "not_a_bool", "attached"),
    ],
)
def test_bad_fields_of_the_best_schedule_are_refused(fields: dict[str, object], kind: str, name: str) -> None:
    with raises(ValueError, kind, name=name):
        GriewankHeterogeneous(**fields)
