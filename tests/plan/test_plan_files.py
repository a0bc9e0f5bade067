"""Plans in files: read back whole; damaged, forged, or for anything but their model, refused with nothing executed."""

import copy
import hashlib
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_profiling.backends import using
from rotor_py import Checkpointable, Plan, PlanMismatchError
from rotor_py.estimation.fake_tensors import FakeCopies
from rotor_py.estimation.simulated_target import PredictedDevice
from tests.checkpointable.steps import Tower, between, blocks, images, planned_at, same_gradients, square, step_peak
from tests.execute.training import assert_same, steps
from tests.fields import check, invoke, kinds, logged, raises
from tests.plan.test_step_plans import plans_counted
from tests.training.loop import Mixer, chain, rows


def network() -> nn.Sequential:
    model = blocks(4, 16)
    model[0].requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def planned() -> Checkpointable:
    return planned_at(0.3, network())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


@pytest.fixture
def file(planned: Checkpointable, path: Path) -> Path:
    planned.save_plan(path)
    return path


def test_a_plan_from_a_file_trains_the_same_inside_the_limit_without_measuring(planned, file) -> None:
    torch.manual_seed(1)
    model, batch = network(), images()
    plain = copy.deepcopy(model)
    runs: list[int] = []
    handle = model[2].register_forward_hook(lambda *_: runs.append(1))
    assert Plan.load(file) == planned.plan()
    loaded = Checkpointable(model, plan=file)
    assert loaded.sequence == planned.sequence
    assert loaded.names == planned.names
    loaded(batch)
    assert len(runs) == 1  # and that is the forward itself: nothing is measured
    handle.remove()
    loaded.load_state_dict(plain.state_dict())
    assert_same(steps(loaded, loaded, batch), steps(plain, plain, batch))
    step_peak(loaded, batch)
    assert step_peak(loaded, batch) <= planned.plan().peak_bytes <= planned.plan().mem_limit


OTHER_MODELS: list[tuple[Callable[[], nn.Sequential], str]] = [
    (lambda: blocks(4, 17), "parameters 0.weight"),
    (lambda: blocks(4, 16), "parameters 0.weight"),  # trained
    (lambda: nn.Sequential(*network()[:5], nn.AdaptiveMaxPool2d(1), *network()[6:]), "layers 5"),
    (lambda: nn.Sequential(*network(), nn.Identity()), "layers 8"),
    (lambda: network().to(torch.bfloat16), "parameters 0.weight"),
]
OTHER_INPUTS: list[tuple[Callable[[], torch.Tensor], str]] = [
    (lambda: images(5), "tensors 0 shape 0"),
    (lambda: images(4, 20), "tensors 0 shape 2"),
    (lambda: images().double(), "tensors 0 dtype"),
    (lambda: images().requires_grad_(), "tensors 0 requires_grad"),
]


def test_another_model_or_input_is_refused_naming_what_differs(file: Path) -> None:
    for make, field in OTHER_MODELS:
        with raises(PlanMismatchError, "plan_for_other_model", name=field):
            Checkpointable(make(), plan=file)
    loaded = Checkpointable(network(), plan=file)
    for batch, field in OTHER_INPUTS:
        with raises(PlanMismatchError, "plan_for_other_model", name=field):
            loaded(batch())
    with torch.autocast("cpu", torch.bfloat16), raises(PlanMismatchError, "plan_for_other_model", name="autocast"):
        loaded(images())
    loaded(images(2)).sum().backward()  # a smaller batch is covered
    loaded[1].requires_grad_(False)  # a model that changes after loading
    with raises(PlanMismatchError, "plan_for_other_model", name="parameters 1.0.weight"):
        loaded(images())


class Skipping(Mixer):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        entry = self.entry(value)
        value = entry
        for layer in self.layers:
            value = nn.functional.gelu(layer(value))
        return self.head(value * entry)


def train(planned: Checkpointable, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    square(planned(rows())).backward()
    optimizer.step()


def same_report(loaded: Checkpointable, saver: Checkpointable) -> None:
    found, expected = loaded.report(), saver.report()
    # How well times are known is not in the file.
    assert found == expected
    assert str(found) == str(expected)
    assert (found.gap, found.sequence.algorithm) == (expected.gap, expected.sequence.algorithm)
    assert loaded.memory() == saver.memory()
    assert loaded.summary() == saver.summary()
    assert loaded.build_chain() == saver.build_chain()


@pytest.mark.parametrize(
    ("make", "fresh_grads"),
    [(lambda: nn.Sequential(nn.Linear(12, 12).requires_grad_(False), *chain(2)), True), (Skipping, False)],
)
def test_the_report_of_a_loaded_plan_is_that_of_the_model_that_saved_it(make, path: Path, fresh_grads: bool) -> None:
    model = make()
    loaded = copy.deepcopy(model)
    saver = planned_at(0.4, model, rows(), optimizer=torch.optim.AdamW(model.parameters()), fresh_grads=fresh_grads)
    saver.save_plan(path)
    loaded = Checkpointable(loaded, plan=path)
    same_report(loaded, saver)  # before any step
    pages = [re.sub(r"Made on .*? with", "", each.report()._repr_html_()) for each in (loaded, saver)]
    assert pages[0] == pages[1]
    for planned in (saver, loaded):
        train(planned, torch.optim.AdamW(planned.parameters()))
    same_report(loaded, saver)
    if make is Skipping:
        assert loaded.memory().beside_bytes > 0
    assert "stored" in str(loaded.report())


def test_a_strategy_by_hand_is_loaded_without_a_limit(path: Path) -> None:
    saver = Checkpointable(chain(2), rows(), loss=square, every_n_layers=3)
    saver.save_plan(path)
    loaded = Checkpointable(chain(2), plan=path)
    same_report(loaded, saver)
    assert loaded.report().mem_limit is None
    assert str(loaded.report()).startswith("Sequential is planned without a limit on cpu")
    assert Checkpointable(chain(2), plan=path, mem_limit="1MB").report().mem_limit == 10**6
    beside = Checkpointable(chain(2), plan=path, mem_limit=1000).report()
    assert not beside.fits
    assert str(beside).startswith("Sequential does not fit in")


def unknown_of_adam(path: Path) -> Checkpointable:
    """A plan with a limit that leaves no room for an optimizer's state, which is not known."""
    saver = planned_at(0.2, chain(), rows())
    saver.save_plan(path)
    return saver


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_a_loaded_plan_has_no_room_for_is_warned_of_with_numbers(path: Path, caplog, given) -> None:
    saver, model = unknown_of_adam(path), chain()
    adam = torch.optim.Adam(model.parameters())
    loaded = Checkpointable(model, plan=path, optimizer=adam if given else None)
    train(loaded, adam)
    train(loaded, adam)
    state = sum(t.nbytes for entry in adam.state.values() for t in entry.values())
    assert loaded.report().peak_bytes >= saver.report().peak_bytes + state
    (record,) = caplog.records
    assert logged(caplog, "late_optimizer", peak_bytes=loaded.report().peak_bytes) == [record]
    assert loaded.sequence == saver.sequence  # the plan in use is that of the file
    assert Checkpointable(chain(), plan=loaded.plan()).report() == loaded.report()


def test_a_loaded_plan_can_be_planned_again_for_another_limit_without_measuring(path: Path) -> None:
    saver = unknown_of_adam(path)
    loaded = Checkpointable(chain(), plan=path)
    limit = between(saver, 0.7)
    with plans_counted(loaded) as measured:
        loaded.compute_sequence(limit)
        loaded.save_plan(path)
    assert measured == []
    assert Plan.load(path).mem_limit == limit
    again = Checkpointable(chain(), plan=path)
    assert str(again.report()) == str(loaded.report())
    assert again.sequence == saver.compute_sequence(limit)
    square(again(rows())).backward()
    again.mem_limit = "1MB"
    again.measure(rows(0, 128))  # which gives the plan up
    square(again(rows(0, 128))).backward()
    assert again.plan().input["tensors"][0]["shape"] == [128, 12]


ROWS = torch.randn(64, 256)
SCRATCH = 50_000_000


def skips() -> nn.Module:
    torch.manual_seed(0)
    return Tower(256, 6)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(each, nn.GELU()) for each in skips().layers))


def of_products(func: Any, *call: Any) -> int:
    """What no kernel of the CPU takes."""
    return SCRATCH if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm) else 0


def predicted(path: Path, model: nn.Module, **options: Any) -> Plan:
    """A plan that was predicted for a device like the CPU, with room for everything."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    without_memory = FakeCopies(mode)
    given: dict[str, Any] = {"kind": "cpu", "memory_bytes": 10**9, "seconds": lambda *call: 1e-6, **options}
    with using(PredictedDevice(**given)), mode:
        network = Checkpointable(without_memory.model(model), loss=torch.mean, mem_limit="800MB")
        network.measure(without_memory.value(ROWS))
        network.save_plan(path)
    return Plan.load(path)


def mean_step(network: nn.Module) -> None:
    network(ROWS).mean().backward()


def test_a_prediction_that_holds_is_followed(path: Path, caplog) -> None:
    assert predicted(path, skips(), name="a good device").predicted_for == "a good device"
    network = Checkpointable(skips(), plan=path)
    for _ in range(3):
        network.zero_grad(set_to_none=False)
        mean_step(network)
    assert kinds(caplog) == []
    assert network.inspection_values == Plan.load(path).costs.measurement


@pytest.mark.parametrize("make", [layers, skips])
def test_one_that_does_not_is_measured_at_the_next_step(path: Path, caplog, make) -> None:
    predicted(path, make(), scratch=of_products, name="a bad device")
    plain, network = make(), Checkpointable(make(), plan=path)
    for _ in range(3):
        mean_step(network)
        mean_step(plain)
    assert len(logged(caplog, "other_than_predicted")) == 1
    assert network.plan().predicted_for is None
    assert network.budget.peak_bytes(network.sequence) < SCRATCH
    assert network.mem_limit == 800_000_000
    assert same_gradients(network, plain)


def test_a_plan_for_cuda_is_none_for_the_cpu(path: Path) -> None:
    predicted(path, layers(), kind="cuda")
    network = Checkpointable(layers(), plan=path)
    with raises(PlanMismatchError, "plan_for_other_model", name="device"):
        mean_step(network)


_heard: list[str] = []
_listening = False


def _listen(event: str, _: tuple[object, ...]) -> None:
    if _listening and event in ("exec", "compile", "pickle.find_class", "import", "os.system", "subprocess.Popen"):
        _heard.append(event)


sys.addaudithook(_listen)


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    make = getattr(request, "param", chain)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    planned_at(0.3, make(), rows()).save_plan(path)
    return make, path.read_text()


both_kinds = pytest.mark.parametrize("saved", [chain, Mixer], indirect=True, ids=["chain", "captured"])


@pytest.fixture
def _nothing_executed() -> Iterator[None]:
    """Python's own audit: no code is compiled, imported, unpickled or started."""
    global _listening
    _heard.clear()
    _listening = True
    yield
    _listening = False
    assert not _heard


def signed(data: dict[str, Any]) -> str:
    """A plan with a digest that fits, as a forger would write it."""
    content = {name: value for name, value in data.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "digest": digest})


def refusal(path: Path, make) -> ValueError:
    """How `Checkpointable` refuses a plan file. It has to be one sentence, and the model must not have been run."""
    model, runs = make(), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: runs.append(1))
    with pytest.raises(ValueError) as caught:
        Checkpointable(model, plan=path)
    assert not runs
    said = str(caught.value)
    assert said.isprintable()  # on one line, and no terminal chokes on it
    assert len(said) < 1200
    return caught.value


def refuses(path: Path, make, kind: str = "") -> None:
    error: Any = refusal(path, make)
    assert error.kind in ((kind,) if kind else ("not_a_plan", "damaged_plan"))
    assert error.name == str(path)


@both_kinds
def test_a_plan_as_it_was_saved_is_taken_and_one_of_another_torch_with_a_warning(saved, path: Path, caplog) -> None:
    make, text = saved
    # Laid out differently, it is the same plan.
    for content in (text, json.dumps(json.loads(text), indent=4), signed({**json.loads(text), "torch": "2.4.1"})):
        assert not caplog.records
        path.write_text(content)
        Checkpointable(make(), plan=path)
    assert logged(caplog, "other_torch", name=str(path))


def test_any_character_that_is_changed_or_missing_is_noticed(saved: tuple[Any, str], path: Path) -> None:
    """A plan with another sequence or limit would break its promise without a word."""
    make, text = saved
    path.write_text(text)
    whole, made = Plan.load(path), 0
    for position in range(0, len(text), 907):
        for other in ("", "1", "x", "}"):
            path.write_text(text[:position] + other + text[position + 1 :])
            try:
                assert Plan.load(path) == whole  # a space, or what was there already
            except ValueError:
                made += 1
    assert made > len(text) / 907
    path.write_text(text.replace("Fe_", "CF_", 1))
    refuses(path, make)
    model = path.with_name("network.py")
    taken = f"model = Checkpointable(torch.nn.Sequential(torch.nn.Linear(2, 2)), plan={str(path)!r})"
    model.write_text(f"import torch\nfrom rotor_py import Checkpointable\nsample = torch.ones(1, 2)\n{taken}\n")
    ended = invoke(model, "--mem-limit", "1GB")  # the command shows the sentence
    assert ended.exit_code == 4
    assert "".join(str(refusal(path, make)).split()) in "".join(ended.output.split())


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("mem_limit", 10**12, "other_digest"),
        ("peak_bytes", 1, "other_peak"),
        ("digest", "0" * 64, "other_digest"),
        ("mem_limit", -1, "bad_field"),
        ("schema", 99, "other_schema"),
        ("sequence", "__import__('os').system('true')", "not_an_operation"),
        ("sequence", "Fe_" + "9" * 5000, "ValueError"),
        ("model", {"layers": {"0": ["Linear"]}, "parameters": {}}, "bad_field"),
        ("input", {"device": "cpu", "autocast": "off", "tensors": [{"shape": [True]}]}, "bad_field"),
        ("traits", [], "wrong_length"),
        ("compiled", {"stages": ["no such stage"], "options": {}, "room": None}, "bad_field"),
        ("compiled", {"stages": [], "options": {"cpp.cxx": ["sh"]}, "room": None}, "bad_field"),
    ],
)
def test_a_field_that_is_not_what_it_was_is_named(saved: tuple[Any, str], path: Path, field, value, cause) -> None:
    make, text = saved
    path.write_text(json.dumps({**json.loads(text), field: value}))
    check(refusal(path, make), "not_a_plan" if cause == "other_schema" else "damaged_plan", cause=cause)


def bad_costs(text: str, path: tuple[Any, ...], value: Any) -> str:
    place = data = json.loads(text)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return signed(data)


def carried(first: int, last: int) -> dict[str, int]:
    return {"nbytes": 1, "first": first, "last": last, "gradient_bytes": 0}


@pytest.mark.parametrize(
    ("place", "value", "cause", "name"),
    [
        (("costs", "stages", 1, "saved_bytes"), -1, "bad_field", "saved_bytes"),
        (("costs", "stages", 1, "backward_temp_bytes"), -(2**50), "out_of_range", None),
        (("costs", "stages", 1, "forward_seconds"), float("nan"), "bad_field", "forward_seconds"),
        (("costs", "stages", 1), {}, "bad_field", "activation_bytes"),
        (("costs", "fixed", "optimizer"), "4", "bad_field", "optimizer"),
        (("costs", "carried"), [carried(1, 999)], "bad_field", "carried"),
        (("costs", "fixed", "other"), 10**9, "other_peak", "peak_bytes"),
        (("solver", "lower_bound"), float("inf"), "bad_field", "lower_bound"),
        (("stages", 0), [1], "bad_field", "stages"),
    ],
)
def test_costs_that_cannot_be_are_refused_though_the_digest_fits(saved, path: Path, place, value, cause, name) -> None:
    make, text = saved
    path.write_text(bad_costs(text, place, value))
    found = {} if name is None else {"field": name}  # the chain names its stages itself
    check(refusal(path, make), "damaged_plan", cause=cause, **found)


@pytest.mark.usefixtures("_nothing_executed")
@pytest.mark.parametrize("depth", [900, 100_000])
def test_deep_nesting_in_any_place_is_refused(saved: tuple[Any, str], path: Path, depth: int) -> None:
    make, text = saved
    data = json.loads(text)
    for field in data:
        path.write_text(json.dumps({**data, field: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth))
        refuses(path, make)


@pytest.mark.usefixtures("_nothing_executed")
def test_files_that_are_no_plan_and_huge_numbers_texts_and_tables_are_refused_at_once(saved, path) -> None:
    make, text = saved
    data = json.loads(text)
    with pytest.raises(FileNotFoundError):
        Checkpointable(make(), plan=path)
    check(refusal(Path("/dev/zero"), make), "not_a_plan", cause="too_large")
    for content in (b"", b"{", b"[]", b'{"schema": 2}', b"\x00", b"\xff", pickle.dumps(os.system)):
        path.write_bytes(content)
        refuses(path, make, "not_a_plan")
    path.write_text(text.replace(f'"mem_limit": {data["mem_limit"]}', '"mem_limit": ' + "7" * 1_000_000))
    refuses(path, make)
    path.write_text(signed({**data, "sequence": "Fe_0, " * 50_000 + "L"}))
    refuses(path, make, "damaged_plan")
    # Costs that would take long to add up.
    most = 10**6 // len(data["stages"])
    path.write_text(bad_costs(text, ("costs", "carried"), [carried(1, 2)] * (most + 1)))
    check(refusal(path, make), "damaged_plan", cause="bad_field", field="carried")


@both_kinds
@pytest.mark.parametrize("name", ["x" * 1_000_000, "\ud800\n\x1b[31m"])
def test_names_that_are_no_layers_are_refused_in_a_sentence(saved: tuple[Any, str], path: Path, name: str) -> None:
    """Of a captured model the layers are known at the first step."""
    make, text = saved
    path.write_text(signed({**json.loads(text), "prefix": [name]}))
    with pytest.raises(PlanMismatchError) as caught:
        Checkpointable(make(), plan=path)(rows())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1200


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**4000) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_forged_plan_is_taken_whole_or_refused_in_a_sentence(saved, path: Path, data: st.DataObject) -> None:
    """Any parts replaced, moved or dropped, under a digest that fits."""
    make, text = saved
    content = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = content
        key = data.draw(st.sampled_from(sorted(content)))
        while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place, dict) and place is not content and data.draw(st.booleans()):
            del place[key]
        else:
            place[key] = data.draw(JUNK | st.sampled_from(list(json.loads(text).values())))
    path.write_text(signed(content))
    try:
        plan = Plan.load(path)
        Checkpointable(make(), plan=path)
        assert plan.mem_limit > 0
    except ValueError:
        refusal(path, make)
