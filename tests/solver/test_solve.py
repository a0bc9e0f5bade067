"""Limits, certificates, bad questions, several solves at once, and which files know the algorithms."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published import published_plan
from rotor_solver import Chain, InfeasibleError, InvalidTypeError, Option, Persistent, Stage, frontier, simulate, solve
from rotor_solver.classic import GriewankHeterogeneous, Periodic, Revolve, Sqrt, forward_steps
from rotor_solver.floating import Floating
from rotor_solver.in_flight import least_in_flight, simulate_forwards
from rotor_solver.memory_timeline import moments
from rotor_solver.offload import Link, plan_moves, simulate_moves, solve_moving, transfers
from rotor_solver.pipeline import equal_cuts, plan_pipeline
from rotor_solver.segments import RecomputeAll, StoreAll, min_bytes, recompute_all, recompute_segments, store_all
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence
from rotor_solver.simulate import skipped_outputs
from rotor_solver.solve import ALGORITHMS
from tests.fields import raises
from tests.quick import run_python
from tests.solver.naive import naive_optimum
from tests.solver.plans import makespan
from tests.solver.strategies import limited, rich_chains, unit_chain


@settings(max_examples=20, deadline=None)
@given(rich_chains(max_stages=7), st.integers(10**6, 10**9), st.data())
def test_sizes_that_no_slot_divides(chain: Chain, factor: int, data: st.DataObject) -> None:
    """Sizes in real bytes: the plan fits, and what is lost to slots is bounded by the certificate."""
    length, times = len(chain), (chain.forward_time, chain.backward_time)
    sizes = data.draw(st.lists(st.integers(0, factor), min_size=length + 1, max_size=length + 1))
    saved, backward_temp = [size + factor // 3 for size in sizes[1:]], [factor // 5] * length + [3]
    real = Chain.from_arrays(*times, sizes, saved, [factor // 7] * length, backward_temp)
    limit = data.draw(limited(st.just(real), below=0))[1]
    optimum = naive_optimum(real, limit)
    assert solve(real, limit).lower_bound <= optimum * (1 + 1e-9)
    assert makespan(Persistent(), real, limit) <= optimum * 1.02 + 1e-9


def test_chains_of_one_stage_of_none_and_with_one_larger_than_the_limit_have_a_least_limit() -> None:
    one = Chain.from_arrays([1], [2, 3], [10, 20], [25], [1], [2, 0])
    # B_0 needs a_0, ā_1, δ_1, δ_0 and its scratch
    assert min_bytes(one) == 10 + 25 + 20 + 10 + 2
    assert str(solve(one, min_bytes(one))) == "Fe_0, L, B_0"
    none = Chain.from_arrays([], [3], [10], [], [], [4])
    assert min_bytes(none) == 10 + 10 + 4
    assert str(solve(none, 24)) == "L"
    with pytest.raises(InfeasibleError):
        solve(none, 23)
    chain = Chain.from_arrays([1] * 3, [1] * 4, [1] * 4, [1, 1000, 1], [0] * 3, [0] * 4)
    with raises(InfeasibleError, "limit_too_small", min_bytes=1004, mem_limit=500):
        solve(chain, 500)
    assert simulate(chain, solve(chain, 1004)).peak == 1004


def test_algorithms_by_name_and_as_objects() -> None:
    chain = unit_chain(6)
    assert solve(chain, 100, "store-all") == solve(chain, 100, StoreAll()) == store_all(chain)
    assert solve(chain, 5, "recompute-all") == solve(chain, 5, RecomputeAll()) == recompute_all(chain)
    assert solve(chain, 6, Persistent(slots=7)) == solve(chain, 6.9, slots=7)  # bytes are rounded down
    with raises(InfeasibleError, "limit_too_small", min_bytes=simulate(chain, store_all(chain)).peak):
        solve(chain, 5, "store-all")
    with pytest.raises(InfeasibleError):
        solve(chain, min_bytes(chain) - 1, "recompute-all")
    plan = solve(unit_chain(9), 6, slots=7)  # numbers of other types are taken as numbers
    assert solve(unit_chain(9), np.float32(6.5), slots=np.int64(7)) == plan == Persistent(7).solve(unit_chain(9), 6.5)
    for algorithm in ALGORITHMS.values():
        with raises(ValueError, "not_bytes", name="mem_limit"):
            algorithm(5).solve(unit_chain(3), "4GB")


STAGE = Stage(1, (Option(1, 1, 1),))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: solve([STAGE], 5), "chain"),
        (lambda: min_bytes(None), "chain"),
        (lambda: simulate(str, store_all(unit_chain(1))), "chain"),
        (lambda: solve(unit_chain(2), 5, 7), "algorithm"),
        (lambda: solve(unit_chain(2), 5, Persistent), "algorithm"),
        (lambda: Persistent(effort=3), "effort"),
        (lambda: Chain(None, 1), "stages"),
        (lambda: Chain((STAGE, 3), 1), "stage 1"),
        (lambda: Chain((Stage(1, STAGE.options[0], name="conv"),), 1), "options of stage 0 (conv)"),
        (lambda: Chain((Stage(1, (None,)),), 1), "option of stage 0"),
        (lambda: Chain.from_arrays(**GOOD | {"saved": 7}), "saved"),
        (lambda: Chain.from_arrays(**GOOD | {"forward_time": np.array(1.0)}), "forward_time"),
        (lambda: frontier(unit_chain(2), 5), "limits"),
        (lambda: simulate(unit_chain(1), None), "operations"),
        (lambda: Sequence.parse(None), "text"),
        (lambda: Sequence((), beside=[()]), "beside"),
        (lambda: skipped_outputs(None), "sequence"),
        (lambda: moments(unit_chain(1), [Loss()]), "sequence"),
        (lambda: transfers(unit_chain(1), None, None), "sequence"),
        (lambda: simulate_forwards(unit_chain(1), [None]), "sequence"),
        *((lambda a=a: a.solve(None, 5), "chain") for a in (Sqrt(), Periodic(), Revolve(), Floating(), StoreAll())),
        (lambda: least_in_flight(None, 2), "chain"),
        (lambda: least_in_flight(unit_chain(1), 2, np.ones(2)), "order"),
        (lambda: plan_pipeline(None, 1, 5, 1), "chain"),
        (lambda: plan_pipeline(unit_chain(1), 1, 5, 1, ["1f1b"]), "schedule"),
        (lambda: plan_pipeline(unit_chain(1), 1, 5, 1, fixed=3), "fixed"),
        (lambda: plan_pipeline(unit_chain(1), 1, 5, 1, boundaries=3), "boundaries"),
        (lambda: equal_cuts(unit_chain(1), None), "plan"),
        (lambda: solve_moving(unit_chain(1), 5, None), "link"),
        (lambda: plan_moves(unit_chain(1), store_all(unit_chain(1)), None, 5), "link"),
        (lambda: simulate_moves(unit_chain(1), store_all(unit_chain(1)), None, Link(1, 1)), "moves"),
        (lambda: Chain((STAGE,), 1, output_held=np.ones(2)), "output_held"),
        (lambda: GriewankHeterogeneous(attached=1), "attached"),
    ],
)
def test_wrong_types_are_refused_in_words(call, name: str) -> None:
    with raises(InvalidTypeError, "wrong_type", name=name):
        call()


@pytest.mark.parametrize(
    ("call", "kind", "name"),
    [
        (lambda: solve(unit_chain(3), -1), "negative", "mem_limit"),
        *(
            (lambda bad=bad: solve(unit_chain(3), bad), "not_bytes", "mem_limit")
            for bad in (math.nan, math.inf, "4GB", True, None)
        ),
        (lambda: solve(unit_chain(3), 10, slots=0), "not_a_count", "slots"),
        (lambda: solve(unit_chain(3), 10, slots=2.5), "not_a_count", "slots"),
        (lambda: solve(unit_chain(3), 10, algorithm="best"), "unknown_value", "algorithm"),
        (lambda: solve(unit_chain(3), 10, work="a second"), "not_work", "work"),
        (lambda: Link(None, 1), "not_a_rate", "out_bytes_per_second"),
        (lambda: simulate(unit_chain(1), [ForwardEnable([0])]), "not_an_operation", None),
        (lambda: simulate(unit_chain(1), [ForwardEnable(0, None)]), "not_an_operation", None),
        (lambda: store_all(unit_chain(1)).of_forwards(None), "not_a_count", "forwards"),
        (lambda: forward_steps(None, 1), "not_a_count", "steps"),
        (lambda: plan_pipeline(unit_chain(2), 2, 5, 1, boundaries=["a"]), "no_such_stage", "boundaries"),
        (lambda: plan_pipeline(unit_chain(2), 2, 5, 1, virtual_stages=np.ones(2)), "not_a_count", "virtual_stages"),
        (lambda: simulate_forwards(unit_chain(1), [store_all(unit_chain(1))], [None, 0, 0]), "wrong_order", "order"),
        (lambda: plan_moves(unit_chain(1), store_all(unit_chain(1)), Link(1, 1), None), "not_bytes", "mem_limit"),
    ],
)
def test_wrong_numbers_are_refused_in_words(call, kind: str, name: str | None) -> None:
    with raises(ValueError, kind, name=name):
        call()


def run(script: str) -> str:
    done = run_python(f"import sys; from rotor_solver import *; {script}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


GOOD = {"forward_time": [1.0, 2.0], "backward_time": [3.0, 4.0, 5.0], "activation": [10, 20, 30], "saved": [21, 31]}
GOOD |= {"forward_temp": [1, 2], "backward_temp": [3, 4, 5]}


def test_arrays_go_in_and_come_out_as_plain_numbers() -> None:
    more = {"gradient": [7, 8], "nograd_time": [0.5, 0.6], "nograd_temp": [9, 9]}
    chain = Chain.from_arrays(**GOOD, **more, names=["a", "b"])
    for name, values in (GOOD | more).items():
        assert list(getattr(chain, name)) == values
    assert [stage.name for stage in chain] == ["a", "b"]
    assert len(chain) == 2
    plain = Chain.from_arrays(**{name: np.array(values, dtype=float) for name, values in GOOD.items()})
    assert plain == Chain.from_arrays(**GOOD) == pickle.loads(pickle.dumps(plain))
    assert hash(plain) == hash(Chain.from_arrays(**GOOD))
    assert all(type(size) is int for size in plain.activation)
    # Without a graph, costs are those of the first option.
    assert (plain.nograd_time, plain.nograd_temp, plain.gradient, plain.replay_temp) == ((1, 2), (1, 2), (0, 0), (3, 4))
    assert plain.released == ((0, 0), (0, 0))
    chain = Chain.from_arrays(**GOOD, input_released=[10, 20], output_released=[15, 0])
    assert chain.released == ((0, 0), (20, 15))  # of both stages; a_0 belongs to the caller


@pytest.mark.parametrize(
    ("name", "values", "kind", "where"),
    [
        ("forward_time", [1.0, float("nan")], "not_seconds", "forward_time of stage 1"),
        ("backward_time", [-1.0, 0.0, 0.0], "not_seconds", "backward_time of stage 0"),
        ("backward_time", [1.0, 0.0, float("nan")], "not_seconds", "loss_time"),
        ("activation", [-1, 2, 3], "out_of_range", "input_bytes"),
        ("activation", [1, 2, 3.5], "not_bytes", "activation of stage 1"),
        ("activation", [1, True, 3], "not_bytes", "activation of stage 0"),
        ("forward_temp", [0, 2**60], "out_of_range", "forward_temp of stage 1"),
        ("backward_temp", [-11, 0, 0], "out_of_range", "backward_temp of stage 0"),
        ("backward_temp", [0, 0, -1], "out_of_range", "loss_temp"),
        ("input_released", [0, 21], "out_of_range", "input_released of stage 1"),
        ("output_released", [0, 31], "out_of_range", "output_released of stage 1"),
        ("saved", [1], "wrong_length", "saved"),
        ("saved", None, "not_bytes", "saved of stage 0"),
        ("saved", [1, 10**400], "out_of_range", "saved of stage 1"),
    ],
)
def test_bad_values_and_stages_without_an_option_are_named(name, values, kind: str, where: str) -> None:
    with raises(ValueError, kind, name=where):
        Chain.from_arrays(**{**GOOD, name: values})
    with raises(ValueError, "no_options", name="stage 0 (conv)"):
        Chain((Stage(1, (), name="conv"),), 1)
    with raises(ValueError, "out_of_range", name="saved of stage 0 (conv)"):
        Chain((Stage(1, (Option(1, 1, -1),), name="conv"),), 1)


def test_sequences_are_written_in_the_notation_of_the_field_and_read_back() -> None:
    operations = [ForwardEnable(0), ForwardCheck(10), ForwardNograd(2), ForwardEnable(3, 1), Loss(), Backward(3)]
    sequence = Sequence(operations)
    assert str(sequence) == "Fe_0, CF_10, Fn_2, Fe_3^1, L, B_3"
    assert Sequence(operations, "persistent", 3.0) == sequence != Sequence(operations[1:])
    again = Sequence.parse(str(sequence)), Sequence.parse(f"[{sequence}]"), pickle.loads(pickle.dumps(sequence))
    assert again == (sequence,) * 3
    assert {*map(hash, again)} == {hash(sequence)}
    assert Sequence.parse("") == Sequence(())


@pytest.mark.parametrize("token", ["Fe_", "fe_0", "F_0", "B_0^1", "CF_-1", "Fe_0^", "L_0", "Fe_0 L", "Fe_٣", "Fe_1.0"])
def test_tokens_and_items_that_are_no_operations_are_named(token: str) -> None:
    with raises(ValueError, "not_an_operation", position=1):
        Sequence.parse(f"L, {token}, L")
    with raises(ValueError, "not_an_operation", position=1):
        Sequence([Loss(), token])  # type: ignore[list-item] # the test


@pytest.mark.parametrize(
    ("again", "text"),
    [
        ([], "Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0"),
        ([range(2)], "CF_0, Fn_1, Fe_2, Fe_3, L, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
        ([range(1, 3)], "Fe_0, CF_1, Fn_2, Fe_3, L, B_3, Fe_1, Fe_2, B_2, B_1, B_0"),
        ([range(2), range(2, 4)], "CF_0, Fn_1, CF_2, Fn_3, L, Fe_2, Fe_3, B_3, B_2, Fe_0, Fe_1, B_1, B_0"),
    ],
)
def test_segments_run_again_right_before_their_backwards(again: list[range], text: str) -> None:
    sequence = recompute_segments(map(ForwardEnable, range(4)), again, "by hand")
    assert (str(sequence), sequence.algorithm) == (text, "by hand")
    own = recompute_segments([ForwardEnable(0, 2), ForwardEnable(1, 1)], [range(1)])
    assert str(own) == "CF_0, Fe_1^1, L, B_1, Fe_0^2, B_0"


CHAINS = json.loads((Path(__file__).resolve().parents[1] / "data" / "chains.json").read_text())


def test_sequences_of_the_published_program_are_understood_and_beaten_where_scratch_memory_is_large() -> None:
    beaten = 0
    for entry in CHAINS:
        names = ("forward_time", "backward_time", "activation", "forward_temp", "backward_temp")
        chain = Chain.from_arrays(**{name: entry[name] for name in names}, saved=entry["saved"][1:])
        for point in entry["points"]:
            if len(chain) <= 4:
                plan = published_plan(chain, point["limit"], slots=point["limit"])
                assert (plan and simulate(chain, plan).makespan) == point["rotor_makespan"]
            if point["rotor_sequence"] and point["rotor_valid"]:
                result = simulate(chain, Sequence.parse(point["rotor_sequence"]))
                assert (result.makespan, result.peak) == (point["rotor_makespan"], point["rotor_peak"])
                assert result.peak > point["limit"] or result.makespan >= point["optimum"]
            beaten += bool(point["rotor_makespan"] and point["optimum"] and point["optimum"] < point["rotor_makespan"])
    assert beaten >= 20  # 22 of 280: the reference would be void without them
