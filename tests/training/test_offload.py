"""Training that moves activations to a file: the numbers of plain training, inside limits, at the time promised."""

from __future__ import annotations

import copy
import errno
import gc
import json
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling.step import measured_peak
from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.errors import OffloadError
from rotor_solver import Backward, Chain, ForwardEnable, InfeasibleError, Loss, Persistent, Sequence, simulate
from rotor_solver.moving import Link, plan_moves, timed_moments
from tests.execute.test_moving import settle
from tests.fields import logged, raises

CPU = torch.device("cpu")
WIDTH, TOKENS, BATCH = 64, 64, 4
Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = value.shape
        heads = self.heads(self.norms[0](value)).view(batch, tokens, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        value = value + self.project(found.transpose(1, 2).reshape(batch, tokens, WIDTH))
        inside = nn.functional.gelu(self.up(self.norms[1](value)))
        if self.dropout:
            inside = nn.functional.dropout(inside, self.dropout, self.training)
        return value + self.down(inside)


class Transformer(nn.Module):
    """No chain: TorchDynamo captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embedding(tokens)
        for block in self.blocks:
            value = block(value)
        return value @ self.embedding.weight.T


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer()


def chain(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, WIDTH), *(Block(dropout) for _ in range(4)), nn.Linear(WIDTH, 50))


def without_dropout() -> nn.Module:
    return chain(0.0)


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for a disk so fast that moving always pays: what a test plans does not depend on this machine's."""
    monkeypatch.setattr("rotor_py.offload.offload.measure_bandwidth", lambda *_: 1e13)


def planned(model: nn.Module, limit: int, folder: Path | None, **options: Any) -> Checkpointable:
    offload = None if folder is None else f"file:{folder}"
    chosen = {"cache": False, "offload": offload, **options}
    return Checkpointable(model, tokens(), mem_limit=limit, loss=loss_of, fresh_grads=True, **chosen)


def tier_of(model: Checkpointable) -> Any:
    """Where what moves waits, which counts its bytes; no user sees it."""
    return model._planner.model.offload.tier


def trained(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(tokens()))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def peak_of(model: Checkpointable) -> int:
    value = tokens()

    def step() -> None:
        loss_of(model(value)).backward()

    present = [*model.parameters(), value]
    try:
        return measured_peak(step, present, CPU)
    finally:
        model.zero_grad()


def limit_between(model: nn.Module, share: float) -> int:
    """A limit between what a step needs at least (0) and what it takes if it stores all (1)."""
    report = planned(copy.deepcopy(model), 10**10, None).report()
    least = report.budget.least_bytes()
    return int(least + share * (report.store_all_bytes - least))


@pytest.mark.parametrize("make", [transformer, chain])
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_step_is_exact_and_inside_a_limit_where_computing_again_alone_is_slower(
    make: Callable[[], nn.Module], share: float, tmp_path: Path
) -> None:
    limit = limit_between(make(), share)
    alone, moving = planned(make(), limit, None), planned(make(), limit, tmp_path)
    report = moving.report()
    assert report.overhead < alone.report().overhead
    nbytes = report.budget.moved_bytes(report.sequence)
    assert nbytes > 0
    tier = tier_of(moving)
    before = tier.moved_bytes
    peak = peak_of(moving)
    assert tier.moved_bytes - before == nbytes
    assert peak <= limit
    assert report.peak_bytes * 0.98 <= peak <= report.peak_bytes
    assert same(trained(moving), trained(make()))
    assert tier.held_bytes == 0
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
        (without_dropout, "in part, elsewhere"),
        (chain, "packed, elsewhere"),
        (chain, "in part, packed, elsewhere"),
        (transformer, "in part, packed, elsewhere"),
    ],
)
def test_what_a_part_or_packing_leaves_is_elsewhere(
    make: Callable[[], nn.Module], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotor_py.plan.source._LEAST_BYTES", 0)
    # What is measured is not to depend on clocks.
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))
    monkeypatch.setattr("rotor_py.measure.stage_measurer.saving_ones", lambda whole, ways, *_: ways)
    model = planned(make(), 10**9, tmp_path)
    budget = model.budget
    assert budget is not None
    assert budget.link is not None
    sequence = model.compute_sequence(10**9, algo=AllIn(way, budget.link))
    assert sequence.moves is not None
    assert len(sequence.moves.stages) >= 2
    nbytes, tier = budget.moved_bytes(sequence), tier_of(model)
    before, peak = tier.moved_bytes, peak_of(model)
    assert tier.moved_bytes - before == nbytes > 0
    assert budget.peak_bytes(sequence) * 0.98 <= peak <= budget.peak_bytes(sequence)
    assert peak < budget.peak_bytes(Sequence(sequence))  # where nothing moves
    assert same(trained(model), trained(make()))
    assert tier.held_bytes == 0
    # From a file, only the names of ways are known.
    file = tmp_path / "plan.json"
    model.save_plan(file)
    again = Checkpointable(make(), plan=file, fresh_grads=True, offload=f"file:{tmp_path}")
    assert same(trained(again, 1), trained(make(), 1))
    assert tier_of(again).moved_bytes == nbytes


def test_nothing_moves_where_that_would_not_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limit_between(chain(), 0.5)
    monkeypatch.setattr("rotor_py.offload.offload.measure_bandwidth", lambda *_: 1e3)
    slow = planned(chain(), limit, tmp_path)
    assert slow.sequence is not None
    assert slow.sequence.moves is None
    assert "nothing is moved to file:" in slow.summary()
    roomy = planned(chain(), 10**9, tmp_path)
    assert roomy.sequence is not None
    assert roomy.sequence.moves is None
    trained(slow)
    assert tier_of(slow).moved_bytes == 0


def test_the_report_says_what_is_moved_where(tmp_path: Path) -> None:
    model = planned(chain(), limit_between(chain(), 0.3), tmp_path)
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


def test_several_forwards_in_flight_are_right_and_told_that_nothing_moves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = planned(chain(), limit_between(chain(), 0.3), tmp_path), chain()

    def gradients(of: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(4)
        (loss_of(of(tokens())) + loss_of(of(tokens().flip(0)))).backward()
        found = [p.grad.clone() for p in of.parameters() if p.grad is not None]
        of.zero_grad()
        return found

    expected = gradients(plain)
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for _ in range(3):
            assert same(gradients(model), expected)
    assert logged(caplog, "moves_nothing", forwards=2)


def test_where_several_forwards_have_no_room_each_moves_as_one_does_and_the_report_counts_all(tmp_path: Path) -> None:
    model = planned(chain(), limit_between(chain(), 0.02), tmp_path)
    tier = tier_of(model)

    def step() -> None:
        (loss_of(model(tokens())) + loss_of(model(tokens().flip(0)))).backward()
        model.zero_grad()

    for _ in range(2):
        step()
    report, before = model.report(), tier.moved_bytes
    assert report.budget.forwards == 2
    assert report.sequence.moves is not None
    assert report.overhead >= 1
    step()
    assert tier.moved_bytes - before == report.budget.moved_bytes(report.sequence) > 0


def test_ctrl_c_in_the_middle_of_a_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = planned(chain(), limit_between(chain(), 0.1), tmp_path), chain()
    tier = tier_of(model)
    trained(model, 1)
    trained(plain, 1)
    go, write, main = threading.Event(), os.pwrite, threading.main_thread().ident

    def interrupting(*args: Any) -> int:
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        assert go.wait(60)
        return write(*args)

    with monkeypatch.context() as slow:
        slow.setattr(os, "pwrite", interrupting)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model(tokens())).backward()
    go.set()
    gc.collect()
    settle(tier)
    model.zero_grad()
    assert same(trained(model), trained(plain))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_ends_the_step_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = planned(chain(), limit_between(chain(), 0.1), tmp_path), chain()

    for call, number, kind in (("pwrite", errno.ENOSPC, "no_space"), ("preadv", errno.EIO, "file_failed")):

        def broken(*args: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as failing:
            failing.setattr(os, call, broken)
            with raises(OffloadError, kind):
                loss_of(model(tokens())).backward()
        model.zero_grad()
        settle(tier_of(model))
    assert same(trained(model), trained(plain))


def test_a_folder_that_is_removed_takes_nothing_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has no name, so that it outlives its folder: between steps, and in the middle of one."""
    folder = tmp_path / "one"
    folder.mkdir()
    model, plain, write = planned(chain(), limit_between(chain(), 0.1), folder), chain(), os.pwrite

    def removing(*args: Any) -> int:
        if folder.exists():
            folder.rmdir()
        return write(*args)

    with monkeypatch.context() as during:
        during.setattr(os, "pwrite", removing)
        assert same(trained(model), trained(plain))
    assert not folder.exists()
    assert same(trained(model), trained(plain))
    tier = tier_of(model)
    assert tier.moved_bytes > 0
    assert tier.held_bytes == 0
    with raises(ValueError, "no_file"):
        trained(copy.deepcopy(model))  # it wants a file of its own
    assert list(tmp_path.iterdir()) == []


def test_gradients_that_add_up_over_batches_are_exact_inside_the_limit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": loss_of, "cache": False, "watch": False}
    report = Checkpointable(chain(), tokens(), 10**10, **options).report()
    least = report.budget.least_bytes()
    limit = int(least + 0.2 * (report.store_all_bytes - least))
    model, plain = Checkpointable(chain(), tokens(), limit, offload=f"file:{tmp_path}", **options), chain()
    assert model.report().budget.moved_bytes(model.sequence) > 0
    value = tokens()

    def accumulated(of: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        for flipped in (value, value.flip(0), value.flip(1)):
            (loss_of(of(flipped)) / 3).backward()
        return [each.grad for each in of.parameters() if each.grad is not None]

    assert same(accumulated(model), accumulated(plain))
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    present = [*model.parameters(), *gradients, value]
    peak = measured_peak(lambda: loss_of(model(value)).backward(), present, CPU)
    predicted = model.report().peak_bytes
    assert 0.97 * predicted <= peak <= predicted <= limit
    assert tier_of(model).held_bytes == 0


def test_a_sequence_that_is_set_has_its_room_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned(chain(), 10**9, tmp_path)
    # Of this very measurement: which options a stage has, and their numbers, can be others at another one.
    assert model.budget is not None
    sequence = model.budget.solve(limit_between(chain(), 0.3), Persistent())
    assert sequence.moves is not None

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(os, "posix_fallocate", full)
        with raises(OffloadError, "no_space"):
            model.sequence = sequence
        with raises(OffloadError, "no_space"):
            planned(chain(), limit_between(chain(), 0.3), tmp_path)
    assert model.sequence is not None
    assert model.sequence.moves is None
    model.sequence = sequence
    assert same(trained(model), trained(chain()))
    assert tier_of(model).moved_bytes > 0


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"forwards_in_flight": 2}, "excluded_together"),
        ({"on_oom": "replan"}, "excluded_together"),
        ({"compile": True}, "excluded_together"),
        ({"every_n_layers": 2}, "excluded_together"),
        ({"offload": "host"}, "no_cuda"),
        ({"offload": "file:"}, "unknown_value"),
        ({"offload": "disk"}, "unknown_value"),
        ({"offload": "file:/not/there"}, "no_file"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(options: dict[str, Any], kind: str, tmp_path: Path) -> None:
    with raises(ValueError, kind, name="offload") as refused:
        Checkpointable(chain(), **{"offload": f"file:{tmp_path}", **options})
    assert "\n" not in str(refused.value)
    with raises(ValueError, "excluded_together", name="offload"):
        Checkpointable(chain(), offload=f"file:{tmp_path}").compile()


def test_a_sharded_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_py.plan.trained_model.is_sharded", lambda *_: True)
    with raises(UnsupportedModelError, "excluded_together", name="offload"):
        planned(chain(), 10**9, tmp_path)


def test_a_plan_from_a_file_moves_what_it_moved_before_and_says_so_if_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = limit_between(chain(), 0.3)
    first = planned(chain(), limit, tmp_path)
    file = tmp_path / "plan.json"
    first.save_plan(file)
    (tmp_path / "other").mkdir()
    loaded = Checkpointable(chain(), plan=file, fresh_grads=True, offload=f"file:{tmp_path / 'other'}")
    assert loaded.sequence == first.sequence
    assert loaded.sequence is not None
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
    planned(chain(), limit_between(chain(), 0.3), None).save_plan(file)
    Checkpointable(chain(), plan=file, fresh_grads=True, offload=f"file:{tmp_path}")
    assert logged(caplog, "moves_nothing")


def test_a_copy_of_a_model_that_offloads_makes_plans_that_offload(tmp_path: Path) -> None:
    limit = limit_between(chain(), 0.3)
    made = planned(chain(), limit, tmp_path)
    assert made.sequence is not None
    copied = copy.deepcopy(made)
    copied.measure(tokens()[:-1])
    copied.compute_sequence(limit)
    assert copied.sequence is not None
    assert copied.sequence.moves is not None


@pytest.mark.parametrize(
    ("part", "change", "cause"),
    [
        (("moves", "wait_out"), lambda waits: [[0], [0], *waits[2:]], "wrong_wait"),
        (("moves", "wait_out"), lambda waits: [[] for _ in waits], "wrong_fetch"),
        (("moves", "fetch"), lambda fetches: fetches[1:], "bad_field"),
        (("costs", "link"), lambda link: {**link, "out_bytes_per_second": 0.0}, "not_a_rate"),
        (("costs", "link_name"), lambda _: 3, "bad_field"),
    ],
)
def test_a_plan_file_whose_moves_are_none_is_refused(part: tuple[str, str], change, cause: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planned(chain(), limit_between(chain(), 0.3), tmp_path).save_plan(file)
    data = json.loads(file.read_text())
    table, field = part
    data[table][field] = change(data[table][field])
    file.write_text(json.dumps(data))
    with raises(ValueError, "damaged_plan", name=str(file), cause=cause):
        Checkpointable(chain(), plan=file, offload=f"file:{tmp_path}")


def test_mixed_precision_and_steps_in_the_backward_go_together_with_moves(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        torch.manual_seed(2)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(tokens()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain, inner = chain(), chain()
    expected = run(plain, torch.optim.AdamW(plain.parameters(), foreach=False))
    optimizer = torch.optim.AdamW(inner.parameters(), foreach=False)
    model = Checkpointable(
        inner, mem_limit=10**9, loss=loss_of, offload=f"file:{tmp_path}", step_in_backward=optimizer, cache=False
    )
    with torch.autocast("cpu", torch.bfloat16):
        model.measure(tokens())
    assert model.budget is not None
    least, most = model.budget.least_bytes(), model.report().store_all_bytes
    model.compute_sequence(int(least + 0.3 * (most - least)))
    assert same(run(model, optimizer), expected)
    assert tier_of(model).moved_bytes > 0
