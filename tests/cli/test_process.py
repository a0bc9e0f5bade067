"""The installed command, as a process of its own."""

import json
from pathlib import Path

import pytest

from rotor_cli.main import main
from tests.quick import ROOT, run_python


def test_stdout_is_json_stderr_is_silent_and_importing_names_leaves_out_what_only_some_models_need(model_file):
    code = f"""
import runpy, sys
from rotor_py import Checkpointable, compare, verify, best_batch, largest_batch
from rotor_py import least_limit, sweep, best_level, estimate
assert "torch" in sys.modules
needless = {{"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "numba", "sympy", "networkx"}}
assert not {{*needless, "rotor_py.capture", "click", "rich", "jinja2", "rotor_cli"}} & set(sys.modules)
sys.argv[1:] = [{model_file()!r}, "--mem-limit", "2600kB", "--verify", "--json", "-"]
runpy.run_module("rotor_cli", run_name="__main__")
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["plan"]["overhead"] > 1
    assert found["verify"]["max_grad_difference"] == 0


def test_a_shell_completes_options_and_files_as_it_is_documented(monkeypatch, capsys):
    text = (ROOT / "docs" / "model-file.md").read_text(encoding="utf-8")
    assert 'eval "$(_ROTOR_PLAN_COMPLETE=bash_source rotor-plan)"' in text
    assert all(f"{shell}_source" in text for shell in ("bash", "zsh", "fish"))
    monkeypatch.setenv("COMP_CWORD", "1")
    asked = [(f"{shell}_source", "", "_ROTOR_PLAN_COMPLETE") for shell in ("bash", "zsh", "fish")]
    completions = [("bash_complete", "--mem", "plain,--mem-limit\n"), ("bash_complete", "net", "file,net\n")]
    for instruction, typed, printed in (*asked, *completions):
        monkeypatch.setenv("_ROTOR_PLAN_COMPLETE", instruction)
        monkeypatch.setenv("COMP_WORDS", f"rotor-plan {typed}")
        with pytest.raises(SystemExit, match="0"):
            main(prog_name="rotor-plan")
        assert printed in capsys.readouterr().out


WRONG_USE = [
    ["neet.py", "--mem-limit", "4GB"],
    ["net.py", "--mem-limit", "4XB"],
    ["net.py", "--budget", "4GB"],
    ["net.py", "--device", "tpu"],
    ["net.py", "--json", "no/such/folder/x.json"],
    ["net.py", "--device-file", "net.toml"],
    ["net.py:modle"],
    ["nosuchpackage.models:net"],
]


def test_help_is_shown_and_wrong_use_reported_before_torch_is_loaded(model_file):
    code = f"""
import sys
from rotor_cli.main import main
main(['--help'], standalone_mode=False)
assert not {{'torch', 'numba', 'rotor_py'}} & set(sys.modules)
print("===")
for arguments in {WRONG_USE!r}:
    print("===", *arguments, file=sys.stderr)
    try: main(arguments)
    except SystemExit as end: assert end.code == 2
    assert not {{"torch", "numba"}} & set(sys.modules), arguments
"""
    result = run_python(code, cwd=Path(model_file()).parent)
    assert result.returncode == 0, result.stderr
    shown, _, more = result.stdout.partition("===")
    assert "Examples:" in shown
    assert "rotor-plan model.py --mem-limit 4GB" in shown
    assert more.strip() == ""
    first, *others = result.stderr.split("=== ")[1:]
    assert "did you mean net.py" in first
    assert len(others) == len(WRONG_USE) - 1
    for each in others:  # click's own have three lines
        assert len(each.split("A file that works:")[0].strip().splitlines()) <= 5, each
