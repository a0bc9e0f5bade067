"""Training that moves activations to a file: the numbers of plain training, inside limits, at the time promised."""

import copy
import errno
import gc
import json
import os
import re
import signal
import threading
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.errors import OffloadError
from rotor_solver import Backward, Chain, ForwardEnable, InfeasibleError, Loss, Persistent, Sequence, simulate
from rotor_solver.offload import Link, plan_moves, timed_moments
from tests.checkpointable.steps import between, square, step_peak
from tests.execute.test_moving import same, settle, tier_of
from tests.fields import logged, raises
from tests.offload.tiers import held
from tests.training.stepping import Block, Language

pytestmark = pytest.mark.usefixtures("fast_link")
WIDTH = 64


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Language(tied=True, width=WIDTH, words=50)


def chain(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, WIDTH), *(Block(WIDTH, dropout) for _ in range(4)), nn.Linear(WIDTH, 50))


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (4, 64), generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, limit: int, folder: Path | None, **options: Any) -> Checkpointable:
    offload = None if folder is None else f"file:{folder}"
    chosen = {"cache": False, "offload": offload, **options}
    return Checkpointable(model, tokens(), mem_limit=limit, loss=square, fresh_grads=True, **chosen)


def trained(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(square(model(tokens())))
        losses[-1].backward()
        optimizer.step()
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def peak_of(model: Checkpointable) -> int:
    peak = step_peak(model, tokens())
    model.zero_grad()
    return peak


@cache
def stored() -> Checkpointable:
    return planned(chain(), 10**10, None)


def limit_between(share: float) -> int:
    """A limit between what a step of the chain needs at least (0) and what it takes if it stores all (1)."""
    return between(stored(), share)


def test_a_step_is_exact_and_inside_a_limit_where_computing_again_alone_is_slower(tmp_path: Path) -> None:
    limit = limit_between(0.1)
    alone, moving = planned(chain(), limit, None), planned(chain(), limit, tmp_path)
    report = moving.report()
    assert report.overhead < alone.report().overhead
    nbytes = report.budget.moved_bytes(report.sequence)
    assert nbytes > 0
    tier = tier_of(moving)
    before, peak = tier.moved_bytes, peak_of(moving)
    threads = threading.active_count()
    assert tier.moved_bytes - before == nbytes
    assert report.peak_bytes * 0.98 <= peak <= report.peak_bytes <= limit
    assert same(trained(moving), trained(chain()))
    assert held(tier) == 0
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class AllIn:
    """Stores all stages that have the `way` in it, and moves a half of what could move."""

    way: str
    link: Link

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        at = [next((n for n, each in enumerate(stage.options) if each.name == self.way), 0) for stage in chain]
        numbers = range(len(chain))
        sequence = Sequence([*map(ForwardEnable, numbers, at), Loss(), *map(Backward, reversed(numbers))])
        with pytest.raises(InfeasibleError) as caught:
            plan_moves(chain, sequence, self.link, 0)
        between = (caught.value.min_bytes + simulate(chain, sequence).peak) // 2
        return Sequence(sequence, "by hand", moves=plan_moves(chain, sequence, self.link, between))


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (partial(chain, 0.0), "in part, elsewhere"),
        (chain, "packed, elsewhere"),
        (transformer, "in part, packed, elsewhere"),
    ],
)
def test_what_a_part_or_packing_leaves_is_elsewhere(make, way: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rotor_py.plan.source._LEAST_BYTES", 0)
    # What is measured is not to depend on clocks.
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))
    monkeypatch.setattr("rotor_py.measure.stage_measurer.saving_ones", lambda whole, ways, *_: ways)
    model = planned(make(), 10**9, tmp_path)
    budget = model.budget
    sequence = model.compute_sequence(10**9, algo=AllIn(way, budget.link))
    assert len(sequence.moves.stages) >= 2
    nbytes, tier = budget.moved_bytes(sequence), tier_of(model)
    before, peak = tier.moved_bytes, peak_of(model)
    assert tier.moved_bytes - before == nbytes > 0
    assert budget.peak_bytes(sequence) * 0.98 <= peak <= budget.peak_bytes(sequence)
    assert peak < budget.peak_bytes(Sequence(sequence))  # where nothing moves
    assert same(trained(model), trained(make()))
    assert held(tier) == 0
    # From a file, only the names of ways are known.
    file = tmp_path / "plan.json"
    model.save_plan(file)
    again = Checkpointable(make(), plan=file, fresh_grads=True, offload=f"file:{tmp_path}")
    assert same(trained(again, 1), trained(make(), 1))
    assert tier_of(again).moved_bytes == nbytes


def test_nothing_moves_where_that_would_not_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limit_between(0.5)
    monkeypatch.setattr("rotor_py.offload.open_tier.measure_bandwidth", lambda *_: 1e3)
    slow = planned(chain(), limit, tmp_path)
    assert slow.sequence.moves is None
    assert "nothing is moved to file:" in slow.summary()
    roomy = planned(chain(), 10**9, tmp_path)
    assert roomy.sequence.moves is None
    trained(slow)
    assert tier_of(slow).moved_bytes == 0


def test_the_report_says_what_is_moved_where_and_copies_are_planned_with_moves(tmp_path: Path) -> None:
    model = planned(chain(), limit_between(0.3), tmp_path)
    assert f"of activations are moved to file:{tmp_path} and back" in model.summary()
    text = str(model.report())
    moved = re.compile(r"stored ([a-z, ]+, )?elsewhere: [0-9.]+ [kM]B moved")  # also in part, or packed
    assert moved.search(" ".join(text.split()))
    assert "of activations are moved to" in text
    report = model.report()
    in_pictures = timed_moments(report.chain, report.shown, report.budget.link)
    assert max(each.during for each in in_pictures) + report.budget.beside_chain(report.shown) == report.peak_bytes
    report.to_html(tmp_path / "page.html")
    assert moved.search((tmp_path / "page.html").read_text())
    copied = copy.deepcopy(model)
    copied.measure(tokens()[:-1])
    assert copied.compute_sequence(model.mem_limit).moves is not None


def test_several_forwards_in_flight_are_right_and_told_that_nothing_moves(tmp_path, caplog) -> None:
    model, plain = planned(chain(), limit_between(0.3), tmp_path), chain()

    def gradients(of: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(4)
        (square(of(tokens())) + square(of(tokens().flip(0)))).backward()
        found = [p.grad.clone() for p in of.parameters()]
        of.zero_grad()
        return found

    expected = gradients(plain)
    for _ in range(3):
        assert same(gradients(model), expected)
    assert logged(caplog, "moves_nothing", forwards=2)


def test_where_several_forwards_have_no_room_each_moves_as_one_does_and_the_report_counts_all(tmp_path: Path) -> None:
    model = planned(chain(), limit_between(0.02), tmp_path)
    tier = tier_of(model)

    def step() -> None:
        (square(model(tokens())) + square(model(tokens().flip(0)))).backward()
        model.zero_grad()

    for _ in range(2):
        step()
    report, before = model.report(), tier.moved_bytes
    assert report.budget.forwards == 2
    assert report.sequence.moves is not None
    assert report.overhead >= 1
    step()
    assert tier.moved_bytes - before == report.budget.moved_bytes(report.sequence) > 0


def test_a_disk_that_fails_ends_a_step_in_a_sentence_and_neither_that_nor_ctrl_c_leaves_anything(tmp_path, monkeypatch):
    model, plain = planned(chain(), limit_between(0.1), tmp_path), chain()
    trained(model, 1)
    trained(plain, 1)
    model.zero_grad()  # else a plan for gradients that are kept may move nothing
    go, write, main = threading.Event(), os.pwrite, threading.get_ident()

    def interrupting(*args: Any) -> int:
        signal.pthread_kill(main, signal.SIGINT)
        assert go.wait(60)
        return write(*args)

    with monkeypatch.context() as slow:
        slow.setattr(os, "pwrite", interrupting)
        with pytest.raises(KeyboardInterrupt):
            square(model(tokens())).backward()
    go.set()
    gc.collect()
    settle(tier_of(model))
    for call, number, kind in (("pwrite", errno.ENOSPC, "no_space"), ("preadv", errno.EIO, "file_failed")):
        model.zero_grad()
        with monkeypatch.context() as failing:
            failing.setattr(os, call, Mock(side_effect=OSError(number, os.strerror(number))))
            with raises(OffloadError, kind):
                square(model(tokens())).backward()
        settle(tier_of(model))
    model.zero_grad()
    assert same(trained(model), trained(plain))
    assert list(tmp_path.iterdir()) == []


def test_gradients_that_add_up_over_batches_are_exact_inside_the_limit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": square, "cache": False, "watch": False}
    limit = between(Checkpointable(chain(), tokens(), 10**10, **options), 0.2)
    model, plain = Checkpointable(chain(), tokens(), limit, offload=f"file:{tmp_path}", **options), chain()
    assert model.report().budget.moved_bytes(model.sequence) > 0
    value = tokens()

    def accumulated(of: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        for flipped in (value, value.flip(0), value.flip(1)):
            (square(of(flipped)) / 3).backward()
        return [each.grad for each in of.parameters()]

    assert same(accumulated(model), accumulated(plain))
    predicted = model.report().peak_bytes
    assert 0.97 * predicted <= step_peak(model, value) <= predicted <= limit
    assert held(tier_of(model)) == 0


def test_a_sequence_that_is_set_has_its_room_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned(chain(), 10**9, tmp_path)
    # Of this very measurement: which options a stage has, and their numbers, can be others at another one.
    sequence = model.budget.solve(limit_between(0.3), Persistent())
    with monkeypatch.context() as failing:
        failing.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
        with raises(OffloadError, "no_space"):
            model.sequence = sequence
        with raises(OffloadError, "no_space"):
            planned(chain(), limit_between(0.3), tmp_path)
    assert model.sequence.moves is None
    model.sequence = sequence
    assert same(trained(model), trained(chain()))
    assert tier_of(model).moved_bytes > 0


def test_what_cannot_be_done_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("no_cuda", {"offload": "host"}),
        ("unknown_value", {"offload": "file:"}),
        ("unknown_value", {"offload": "disk"}),
        ("no_file", {"offload": "file:/not/there"}),
    ]
    for kind, options in refused:
        with raises(ValueError, kind, name="offload") as caught:
            Checkpointable(chain(), **{"offload": f"file:{tmp_path}", **options})
        assert "\n" not in str(caught.value)
    with raises(ValueError, "excluded_together", name="offload"):
        Checkpointable(chain(), offload=f"file:{tmp_path}").compile()
    monkeypatch.setattr("rotor_py.plan.trained_model.is_sharded", lambda *_: True)
    with raises(UnsupportedModelError, "excluded_together", name="offload"):
        planned(chain(), 10**9, tmp_path)


def test_a_plan_from_a_file_moves_what_it_moved_before_and_says_so_if_nothing(tmp_path, caplog) -> None:
    limit = limit_between(0.3)
    first = planned(chain(), limit, tmp_path)
    file = tmp_path / "plan.json"
    first.save_plan(file)
    (tmp_path / "other").mkdir()
    loaded = Checkpointable(chain(), plan=file, fresh_grads=True, offload=f"file:{tmp_path / 'other'}")
    assert loaded.sequence == first.sequence
    assert loaded.sequence.moves is not None
    assert loaded.report().peak_bytes == first.report().peak_bytes
    assert loaded.report().overhead == first.report().overhead
    loaded.save_plan(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == file.read_text()
    assert peak_of(loaded) <= limit
    assert tier_of(loaded).moved_bytes > 0
    assert same(trained(loaded), trained(chain()))
    with raises(ValueError, "no_tier", name="offload"):
        Checkpointable(chain(), plan=file, fresh_grads=True)
    # Moves that are none are refused.
    written = file.read_text()
    for table, field, change, cause in (
        ("moves", "wait_out", lambda waits: [[0], [0], *waits[2:]], "wrong_wait"),
        ("moves", "wait_out", lambda waits: [[] for _ in waits], "wrong_fetch"),
        ("moves", "fetch", lambda fetches: fetches[1:], "bad_field"),
        ("costs", "link", lambda link: {**link, "out_bytes_per_second": 0.0}, "not_a_rate"),
        ("costs", "link_name", lambda _: 3, "bad_field"),
    ):
        data = json.loads(written)
        data[table][field] = change(data[table][field])
        file.write_text(json.dumps(data))
        with raises(ValueError, "damaged_plan", name=str(file), cause=cause):
            Checkpointable(chain(), plan=file, offload=f"file:{tmp_path}")
    stored().compute_sequence(limit)
    stored().save_plan(file)
    Checkpointable(chain(), plan=file, fresh_grads=True, offload=f"file:{tmp_path}")
    assert logged(caplog, "moves_nothing")


def test_mixed_precision_and_steps_in_the_backward_go_together_with_moves(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        torch.manual_seed(2)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = square(model(tokens()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain, inner = chain(), chain()
    expected = run(plain, torch.optim.AdamW(plain.parameters(), foreach=False))
    optimizer = torch.optim.AdamW(inner.parameters(), foreach=False)
    model = Checkpointable(
        inner, mem_limit=10**9, loss=square, offload=f"file:{tmp_path}", step_in_backward=optimizer, cache=False
    )
    with torch.autocast("cpu", torch.bfloat16):
        model.measure(tokens())
    model.compute_sequence(between(model, 0.3))
    assert same(run(model, optimizer), expected)
    assert tier_of(model).moved_bytes > 0
