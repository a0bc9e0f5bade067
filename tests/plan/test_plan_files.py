"""Plan files that are damaged, forged or no plans at all: refused in one sentence, and nothing of them is executed."""

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rotor_py import Checkpointable, Plan, PlanMismatchError
from tests.fields import check, invoke, logged
from tests.training.loop import Mixer, chain, planned, rows

_heard: list[str] = []
_listening = False


def _listen(event: str, _: tuple[object, ...]) -> None:
    if _listening and event in ("exec", "compile", "pickle.find_class", "import", "os.system", "subprocess.Popen"):
        _heard.append(event)


sys.addaudithook(_listen)


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The kind of a model, and the text of its plan."""
    make = getattr(request, "param", chain)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    planned(make(), share=0.3).save_plan(path)
    return make, path.read_text()


both_kinds = pytest.mark.parametrize("saved", [chain, Mixer], indirect=True, ids=["chain", "captured"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


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
        ("mem_limit", 1e9, "bad_field"),
        ("schema", 99, "other_schema"),
        ("schema", 5.0, "other_schema"),
        ("sequence", "__import__('os').system('true')", "not_an_operation"),
        ("sequence", "Fe_" + "9" * 5000, "ValueError"),
        ("predicted_for", 3, "bad_field"),
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
        (("costs", "stages"), [], "wrong_length", "stages"),
        (("costs", "fixed", "optimizer"), "4", "bad_field", "optimizer"),
        (("costs", "more"), 1, "bad_field", "more"),
        (("costs", "carried"), [carried(3, 2)], "bad_field", "carried"),
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
@pytest.mark.parametrize("name", ["x" * 10_000_000, "\ud800\n\x1b[31m"])
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
