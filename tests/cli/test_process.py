"""The installed command, as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rotor_cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "solver", "profiling", "cli"))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd, timeout=240, check=False
    )


def test_stdout_is_json_stderr_is_silent_and_questions_in_python_load_neither_click_nor_a_renderer(model_file):
    code = f"""
import runpy, sys
from rotor_py import Checkpointable, compare, verify
assert not {{"click", "rich", "jinja2", "rotor_cli"}} & set(sys.modules)
sys.argv[1:] = [{model_file()!r}, "--mem-limit", "2600kB", "--verify", "--json", "-"]
runpy.run_module("rotor_cli", run_name="__main__")
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["plan"]["overhead"] > 1
    assert found["verify"]["max_grad_difference"] == 0


@pytest.mark.parametrize(("typed", "completed"), [("--mem", "plain,--mem-limit"), ("net", "file,net")])
def test_a_shell_completes_options_and_files(typed, completed):
    asked = {"_ROTOR_PLAN_COMPLETE": "bash_complete", "COMP_WORDS": f"rotor-plan {typed}", "COMP_CWORD": "1"}
    result = python("from rotor_cli.main import main; main(prog_name='rotor-plan')", **asked)
    assert completed in result.stdout.splitlines()


def test_completion_is_documented_as_the_command_offers_it(monkeypatch, capsys):
    text = (ROOT / "docs" / "model-file.md").read_text(encoding="utf-8")
    assert 'eval "$(_ROTOR_PLAN_COMPLETE=bash_source rotor-plan)"' in text
    for shell in ("bash", "zsh", "fish"):
        assert f"{shell}_source" in text
        monkeypatch.setenv("_ROTOR_PLAN_COMPLETE", f"{shell}_source")
        with pytest.raises(SystemExit, match="0"):
            main(prog_name="rotor-plan")
        assert "_ROTOR_PLAN_COMPLETE" in capsys.readouterr().out


def test_help_loads_neither_torch_nor_numba():
    code = "import sys; from rotor_cli.main import main; main(['--help'], standalone_mode=False); "
    result = python(code + "assert not {'torch', 'numba', 'rotor_py'} & set(sys.modules)")
    assert result.returncode == 0, result.stderr
    assert "Examples:" in result.stdout
    assert "rotor-plan model.py --mem-limit 4GB" in result.stdout


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


def test_wrong_use_is_reported_before_torch_is_loaded(model_file):
    code = f"""
import sys
from rotor_cli.main import main
for arguments in {WRONG_USE!r}:
    print("===", *arguments, file=sys.stderr)
    try: main(arguments)
    except SystemExit as end: assert end.code == 2
    assert not {{"torch", "numba"}} & set(sys.modules), arguments
"""
    result = python(code, cwd=Path(model_file()).parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    first, *others = result.stderr.split("=== ")[1:]
    assert "did you mean net.py" in first
    assert len(others) == len(WRONG_USE) - 1
    for each in others:  # click's own have three lines
        assert len(each.split("A file that works:")[0].strip().splitlines()) <= 5, each


def test_errors_of_a_model_that_was_measured_are_on_stderr_only(model_file, capfd):
    with pytest.raises(SystemExit, match="3"):
        main([model_file(), "--mem-limit", "1kB"])
    out, err = capfd.readouterr()
    assert (out, "rotor-plan: " in err) == ("", True)
