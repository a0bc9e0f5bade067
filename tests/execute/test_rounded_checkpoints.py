"""Sequences that keep checkpoints in fewer bits (`CF_3~`): the forward is exact, and what is run again is rounded."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_py import CheckpointOptim
from rotor_py.execute.program import program
from rotor_py.execute.regions import regions
from rotor_py.execute.store import ActivationStore
from rotor_py.execute.tape import replay
from rotor_py.stage.keepers import rounded_value
from rotor_py.stage.keepers.fewer_bits import FEWER_BITS
from rotor_py.stage.keepers.rounded_value import RoundedValue, Rounding, roundable
from rotor_py.stage.runner import StageRunner
from rotor_solver import Backward, ForwardCheck, ForwardEnable, Operation, Sequence
from tests.execute.sequences import any_sequence, persistent_sequence
from tests.execute.training import CPU, assert_same, cut_of, steps
from tests.execute.zoo import ZOO

BF16 = FEWER_BITS["bf16"]
ROWS = 256


@dataclass(frozen=True)
class Copy:
    """A tensor with all of its bits, in other memory."""

    values: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.values,)

    def tensor(self) -> torch.Tensor:
        return self.values.clone()


@dataclass(frozen=True)
class Lossless:
    """Stands for a form that rounds, and loses nothing: whatever differs then is a fault of ours."""

    dtype: torch.dtype = torch.float8_e4m3fn
    kept: list[int] = field(default_factory=list)

    def rounded(self, memory: torch.Tensor) -> Copy:
        self.kept.append(memory.nbytes)
        return Copy(memory.clone())


def all_rounded(sequence: Sequence) -> Sequence:
    """The sequence with every checkpoint rounded that stands alone."""
    operations: list[Operation] = []
    attached: set[int] = set()
    for operation in sequence:
        match operation:
            case ForwardCheck(stage):
                alone = stage > 0 and not {stage, stage + 1} & attached
                operations.append(ForwardCheck(stage, rounded=alone))
                continue
            case ForwardEnable(stage):
                attached.add(stage + 1)
            case Backward(stage):
                attached.discard(stage + 1)
        operations.append(operation)
    return Sequence(operations)


def rounding_of(model: nn.Module, sample: Any, word: str = "bf16") -> Rounding:
    """What can be rounded between the stages of a model."""
    found = cut_of(model, sample)
    value, positions = sample, {}
    with torch.no_grad():
        for _, layer in found.prefix:
            value = layer(value)
        for number, (_, function) in enumerate(found.stages):
            held = [*model.parameters(), *model.buffers(), *tensors_in(sample)]
            positions[number] = roundable(value, FEWER_BITS[word], held)
            value = function(value)
    return Rounding(word, positions)


def followed(model: nn.Module, sample: Any, sequence: Sequence, rounding: Rounding | None) -> Callable[[Any], Any]:
    found = cut_of(model, sample)

    def forward(value: Any) -> Any:
        for _, layer in found.prefix:
            value = layer(value)
        runners = [StageRunner(function, name) for name, function in found.stages]
        return replay(runners, program(len(runners), sequence), value, rounding=rounding)

    return forward


@pytest.mark.parametrize("name", ZOO)
def test_everything_but_what_is_rounded_is_plain_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random states, autocast, buffers, structures and views, from a checkpoint that went to other memory and back."""
    form = Lossless()
    monkeypatch.setitem(FEWER_BITS, "bf16", form)
    monkeypatch.setattr(rounded_value, "LEAST_BYTES", 0)
    case = ZOO[name]
    torch.manual_seed(0)
    model, sample = case.model(), case.sample()
    plain = copy.deepcopy(model)
    expected = steps(plain, plain, sample, case.autocast)
    length = len(cut_of(model, sample).stages)
    for kind in (persistent_sequence, any_sequence):
        for seed in range(3):
            kept = copy.deepcopy(model)
            with case.autocast or nullcontext():
                rounding = rounding_of(copy.deepcopy(model), sample)
                forward = followed(kept, sample, all_rounded(kind(length, random.Random(seed))), rounding)
            assert_same(steps(kept, forward, sample, case.autocast), expected)
    assert form.kept or length < 3 or name == "views"


SEQUENCE = Sequence.parse(
    "CF_0, CF_1~, Fn_2, CF_3~, Fn_4, Fe_5, L, B_5, CF_3~, Fe_4, B_4, Fe_3, B_3, Fe_1, Fe_2, B_2, B_1, Fe_0, B_0"
)


def tower(width: int = 32) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.BatchNorm1d(width))] * 6
    return nn.Sequential(*map(copy.deepcopy, layers))


def rows(width: int = 32) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(ROWS, width)


def stages_of(model: nn.Sequential) -> list[StageRunner]:
    return [StageRunner(layer, str(number)) for number, layer in enumerate(model)]


ROUNDING = {word: Rounding(word, dict.fromkeys(range(1, 6), (0,))) for word in FEWER_BITS}


def run(model: nn.Sequential, batch: torch.Tensor, word: str = "bf16") -> torch.Tensor:
    torch.manual_seed(5)
    return replay(stages_of(model), program(6, SEQUENCE), batch, rounding=ROUNDING[word])  # type: ignore[no-any-return]


def loss_of(made: torch.Tensor) -> torch.Tensor:
    return (made[:, 1:] * made[:, :-1].sin()).mean()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def trained(model: nn.Sequential, word: str | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, all gradients and all buffers of a step; plain without a word."""
    batch = rows()
    torch.manual_seed(5)
    loss = loss_of(model(batch) if word is None else run(model, batch, word))
    loss.backward()
    return loss.detach(), gradients(model), torch.cat([each.flatten().double() for each in model.buffers()])


@pytest.mark.parametrize(("word", "most"), [("bf16", 0.01), ("int8", 0.02), ("fp8", 0.1)])
def test_the_loss_is_exact_and_gradients_are_close(word: str, most: float) -> None:
    expected, found, again = trained(tower(), None), trained(tower(), word), trained(tower(), word)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])  # buffers move in the forward alone
    assert 0 < float((found[1] - expected[1]).norm() / expected[1].norm()) < most
    assert torch.equal(found[1], again[1])


def test_a_checkpoint_takes_its_fewer_bits_while_it_waits() -> None:
    model, batch, store = tower(), rows(), ActivationStore()
    made = replay(stages_of(model), program(6, SEQUENCE), batch, store, rounding=ROUNDING["bf16"])
    whole = ROWS * 32 * 4
    assert sorted(store) == [0, 1, 3]
    assert store.nbytes == whole + 2 * whole // 2
    made.sum().backward()
    assert not len(store)


def test_a_retained_graph_and_forwards_in_flight_find_the_rounded_checkpoint_again() -> None:
    expected = trained(tower(), "bf16")[1]
    model = tower()
    loss = loss_of(run(model, rows()))
    loss.backward(retain_graph=True)
    assert torch.equal(gradients(model), expected)
    model.zero_grad()
    loss.backward()
    assert torch.equal(gradients(model), expected)
    model = tower()
    first, second = run(model, rows()), run(model, rows())
    loss_of(first).backward()
    assert torch.equal(gradients(model), expected)
    model.zero_grad()
    loss_of(second).backward()
    assert torch.equal(gradients(model), expected)


def test_numbers_that_are_not_finite_stay_as_they_are_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    layers = [nn.Linear(32, 32) for _ in range(6)]
    with torch.no_grad():
        layers[0].weight.fill_(1e38)
        layers[1].weight.fill_(1e-38)
    model, plain = nn.Sequential(*layers), copy.deepcopy(nn.Sequential(*layers))
    batch = rows().abs() + 1
    rounding = Rounding("fp8", dict.fromkeys(range(1, 6), (0,)))
    instructions = program(
        6, Sequence.parse("CF_0, CF_1~, Fe_2, Fe_3, Fe_4, Fe_5, L, B_5, B_4, B_3, B_2, Fe_1, B_1, Fe_0, B_0")
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = replay(stages_of(model), instructions, batch, rounding=rounding)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the input of stage '1' has numbers that are not finite" in said
    made.nan_to_num(0, 0, 0).sum().backward()
    plain(batch).nan_to_num(0, 0, 0).sum().backward()
    assert torch.equal(gradients(model), gradients(plain)) or gradients(plain).isnan().any()


def test_a_value_comes_back_in_its_structure_with_exact_what_is_not_rounded() -> None:
    base = torch.randn(4, 2048)
    value = {"views": (base[:2], base.t()), "indices": torch.arange(4096), "small": torch.randn(8), "none": None}
    mask = torch.ones(4096, dtype=torch.bool)
    positions = roundable((value, mask), BF16, [])
    assert positions == (0, 1)
    rounded = RoundedValue((value, mask), positions, BF16)
    assert sum(each.untyped_storage().nbytes() for each in rounded.tensors()) == 2 * 8192 + 8 * 4096 + 32 + 4096
    found, same = rounded.whole()
    one, other = found["views"]
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert torch.equal(other, base.bfloat16().float().t())
    assert other.stride() == base.t().stride()
    assert found["indices"] is value["indices"]
    assert found["small"] is value["small"]
    assert same is mask


def test_what_somebody_else_holds_is_not_rounded() -> None:
    value = torch.randn(4096), nn.Parameter(torch.randn(4096)), torch.randn(4096, dtype=torch.bfloat16)
    assert roundable(value, BF16, []) == (0, 1)
    assert roundable(value, BF16, [value[1]]) == (0,)
    assert roundable(value, BF16, [value[0].view(64, 64), value[1]]) == ()
    assert roundable((value[0], value[0].view(torch.int32)), BF16, []) == ()


def test_rounded_checkpoints_have_to_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"keeps the inputs of stages \[1, 3\] in fewer bits.* give keep="):
        replay(stages_of(tower()), program(6, SEQUENCE), rows())
    with pytest.raises(ValueError, match="give keep="):
        CheckpointOptim.apply(list(tower()), str(SEQUENCE), list("012345"), True, rows())
    with pytest.raises(ValueError, match="CF_1~ keeps a checkpoint in fewer bits, which regions do not"):
        regions(SEQUENCE)


def test_a_stage_that_does_something_else_when_it_is_run_again_says_that_it_was_from_rounded_numbers() -> None:
    class Choosing(nn.Module):
        """Decides by the last bits of its input, where no operator of torch shows it."""

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if not any(map(int, value.detach().numpy().view("int32").ravel() & 0xFFFF)):
                value = value.sort().values
            return value - value.max()

    layers: list[nn.Module] = [nn.Linear(32, 32), nn.Linear(32, 32), Choosing(), nn.Linear(32, 32)]
    instructions = program(4, Sequence.parse("CF_0, Fn_1, CF_2~, Fe_3, L, B_3, Fe_2, B_2, Fe_0, Fe_1, B_1, B_0"))
    made = replay(stages_of(nn.Sequential(*layers)), instructions, rows(), rounding=ROUNDING["bf16"])
    with pytest.raises(RuntimeError) as raised:
        made.sum().backward()
    assert "did not decide in the forward" in str(raised.value)
    assert any("without keep=" in note for note in raised.value.__notes__)


def test_what_a_stage_has_decided_by_exact_numbers_is_not_decided_anew_by_rounded_ones() -> None:
    class Largest(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * nn.functional.one_hot(value.argmax(1), value.shape[1])

    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), Largest(), nn.Linear(32, 32)]
    with torch.no_grad():  # the two largest of a row are the same once they are rounded
        layers[0].weight.copy_(torch.eye(32))  # type: ignore[operator]
        layers[0].bias.zero_()  # type: ignore[operator, union-attr]
    batch = torch.rand(ROWS, 32) / 2
    batch[:, 5], batch[:, 3] = 1.0001, 1.0
    model, plain = nn.Sequential(*layers), copy.deepcopy(nn.Sequential(*layers))
    instructions = program(3, Sequence.parse("CF_0, CF_1~, Fe_2, L, B_2, Fe_1, B_1, Fe_0, B_0"))
    replay(stages_of(model), instructions, batch, rounding=ROUNDING["bf16"]).sum().backward()
    plain(batch).sum().backward()
    assert torch.equal(layers[0].bias.grad != 0, plain[0].bias.grad != 0)  # type: ignore[union-attr]


def test_the_peak_is_that_of_a_step_with_smaller_checkpoints() -> None:
    """Of a tower without scratch memory, the whole difference shows."""

    def peak(sequence: str) -> int:
        model, batch = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12))), torch.randn(4096, 32)
        rounding = Rounding("bf16", dict.fromkeys(range(1, 12), (0,)))
        instructions = program(12, Sequence.parse(sequence))

        def step() -> None:
            replay(stages_of(model), instructions, batch, rounding=rounding).sum().backward()

        step()
        return measured_peak(step, [batch, *model.parameters()], CPU)

    exact = ", ".join(f"CF_{i}" for i in range(11)) + ", Fe_11, L, B_11"
    exact += "".join(f", Fe_{i}, B_{i}" for i in reversed(range(11)))
    rounded = ", ".join(f"CF_{i}~" if i else "CF_0" for i in range(11)) + exact[exact.index(", Fe_11") :]
    saved = 10 * 4096 * 32 * 2
    assert 0.8 * saved <= peak(exact) - peak(rounded) <= saved
