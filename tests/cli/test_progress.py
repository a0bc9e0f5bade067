"""What a terminal shows while the command works, and where it shows nothing."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Thread

import pytest

from rotor_cli.main import main
from rotor_py.report import progress
from rotor_py.report.progress import Activities, TimeLeft, activities, in_words
from rotor_solver.jit_policy import PREPARING

SLOW = """
import time
import torch
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)

model = nn.Sequential(*[Slow(16 + i, 17 + i) for i in range(5)])
sample = torch.randn(64, 16)
"""
_markers = count()
LEFT = r"about \d+ (s|min) left"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal:
    """A pseudo-terminal, which stands for stderr while a test function runs `on` it.

    `text` is what was written to it, without the codes that move and colour.
    """

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.stream = os.fdopen(os.dup(self.slave), "w")
        self._written = bytearray()
        self._reader = Thread(target=self._keep, daemon=True)  # whoever writes waits while nobody reads
        self._reader.start()

    def _keep(self) -> None:
        with suppress(OSError):  # the other end is closed
            while part := os.read(self.master, 65536):
                self._written += part

    def on(self) -> None:
        """To be called by the test itself: pytest puts streams of its own in place before every phase of a test."""
        sys.stderr = self.stream

    def read(self) -> str:
        """All that was written so far."""
        marker = f"\x1b[{next(_markers)}z".encode()
        os.write(self.slave, marker)
        deadline = time.monotonic() + 20
        while marker not in self._written and time.monotonic() < deadline:
            time.sleep(0.001)
        return re.sub(r"\x1b\[[0-9]+z", "", self._written.decode())

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.read())

    def close(self) -> None:
        self.stream.close()
        os.close(self.slave)
        self._reader.join()
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch) -> Iterator[Terminal]:
    """Stands for stderr."""
    found = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    yield found
    found.close()


@pytest.fixture
def run(monkeypatch, capfd) -> Callable[..., str]:
    """The command in this process, with a short patience; what it writes to stdout."""
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "_REDRAWN_SECONDS", 0.0)

    def run(*arguments: object) -> str:
        main([str(argument) for argument in arguments], standalone_mode=False)
        return capfd.readouterr().out

    return run


def test_the_time_left_is_that_of_the_rest_at_the_pace_so_far() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    assert left.update("measuring", 0, 10) is None
    clock.now += 6
    assert left.update("measuring", 2, 10) == pytest.approx(24)
    clock.now += 2
    assert left.update("measuring", 8, 10) == pytest.approx(2)
    assert left.update("measuring", 10, 10) == 0
    for name, done, total in (("solving", 3, 10), ("measuring", 3, 11), ("measuring", 1, 10)):
        clock.now += 100
        assert left.update(name, done, total) is None, "other work begins a new estimate"
        clock.now += 4
        assert left.update(name, done + 2, total) == pytest.approx(2 * (total - done - 2))
    words = {None: "", 0.2: "about 1 s left", 42.4: "about 42 s left", 100: "about 2 min left", 9000: "about 2 h left"}
    assert {seconds: in_words(seconds) for seconds in words} == words


def test_a_line_says_what_is_done_how_much_of_it_and_how_long_it_takes(terminal: Terminal) -> None:
    terminal.on()
    clock = Clock()
    shown = Activities(True, clock)
    tell = shown.doing("measuring")
    tell(0, 8, "0.conv")
    assert terminal.read() == ""  # not yet a second
    clock.now += 30
    tell(3, 8, "blocks[b].3.conv")
    assert "measuring blocks[b].3.conv" in terminal.text
    assert "4 of 8, about 50 s left" in terminal.text
    shown.doing("solving")(120_000, 480_000, "100 stages, 500 slots")
    assert "solving 100 stages, 500 slots" in terminal.text
    assert "25 %" in terminal.text
    shown.stop()
    assert terminal.read().endswith("\x1b[2K")  # the line is erased
    before = terminal.read()
    tell(4, 8, "late")
    assert terminal.read() == before


def test_work_that_tells_nothing_more_is_shown_at_once(terminal: Terminal) -> None:
    """The solver's kernels are compiled right after a table is full: the line must not stand at 100 %."""
    terminal.on()
    clock = Clock()
    shown = Activities(True, clock)
    tell = shown.doing("solving")
    tell(0, 480_000, "100 stages, 500 slots")
    clock.now += 30
    tell(480_000, 480_000, "100 stages, 500 slots")
    assert "100 %" in terminal.text
    before = len(terminal.text)
    tell(0, 0, PREPARING)
    drawn = terminal.text[before:]
    assert "solving (preparing the solver, once on this machine)" in drawn
    assert "%" not in drawn
    assert "left" not in drawn
    shown.stop()


@pytest.mark.parametrize("columns", [40, 80])
def test_the_line_is_no_wider_than_the_terminal(terminal: Terminal, monkeypatch, columns: int) -> None:
    terminal.on()
    monkeypatch.setenv("COLUMNS", str(columns))
    clock = Clock()
    shown = Activities(True, clock)
    shown.doing("measuring")(0, 800, "x")
    clock.now += 3000
    shown.doing("measuring")(7, 800, "encoder.layers." * 20)
    shown.stop()
    lines = [line for line in re.split(r"[\r\n]+", terminal.text) if line.strip()]
    assert lines
    assert max(map(len, lines)) <= columns
    assert "8 of 800, about 94 h left" in terminal.text


def test_the_first_part_of_long_work_is_shown_before_it_is_done(terminal: Terminal, monkeypatch) -> None:
    terminal.on()
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.05)
    with activities() as shown:
        shown.doing("measuring")(0, 8, "first")
        deadline = time.monotonic() + 20
        while "measuring first" not in terminal.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "1 of 8" in terminal.text


def test_short_work_shows_nothing(terminal: Terminal, model_file, monkeypatch, capfd) -> None:
    terminal.on()
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 60.0)
    main([model_file(), "--mem-limit", "1GB"], standalone_mode=False)
    assert terminal.read() == ""
    assert "fits" in capfd.readouterr().out


def test_long_work_shows_what_is_done_and_the_time_left_and_leaves_stdout_alone(
    terminal: Terminal, run, model_file, monkeypatch
) -> None:
    terminal.on()
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)  # solving is quick
    report = json.loads(
        run(model_file(SLOW, "slow.py"), "--max-overhead", "30%", "--compare", "--verify", "--json", "-")
    )
    assert report["verify"]["max_grad_difference"] == 0
    for words in (
        "loading ", "measuring 0 ", "2 of 5, about", "measuring 4 ", "sweeping sqrt", "sweeping 5 stages", "limits",
        "comparing revolve", "comparing recompute-all", "verifying: a step with the plan", "verifying: a plain step",
    ):  # fmt: skip
        assert words in terminal.text, words
    assert re.search(rf"measuring 3 .*4 of 5, {LEFT}", terminal.text)


def test_quiet_shows_nothing(terminal: Terminal, run, model_file) -> None:
    terminal.on()
    assert "fits" in run(model_file(SLOW, "slow.py"), "--mem-limit", "1GB", "--verify", "-q")
    assert terminal.read() == ""


def test_a_piped_stderr_gets_nothing_even_where_colours_are_forced(model_file, capfd, monkeypatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    main([model_file(SLOW, "slow.py"), "--mem-limit", "1GB", "--json", "-"], standalone_mode=False)
    assert capfd.readouterr().err == ""


def test_a_failure_is_on_a_line_of_its_own_after_the_progress(terminal: Terminal, run, model_file) -> None:
    terminal.on()
    with pytest.raises(Exception, match="a limit of"):
        run(model_file(SLOW, "slow.py"), "--mem-limit", "19kB")
    assert "measuring" in terminal.text
    assert terminal.read().endswith("\x1b[2K")


@pytest.mark.slow
def test_the_command_as_a_process_shows_progress_on_the_terminal_and_json_in_the_pipe(model_file) -> None:
    found = Terminal()
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(str(root / folder) for folder in (".", "solver", "profiling", "cli"))
    slow = SLOW.replace("0.005", "0.03")
    process = subprocess.Popen(
        [sys.executable, "-m", "rotor_cli", model_file(slow, "slow.py"), "--mem-limit", "1GB", "--json", "-"],
        stdout=subprocess.PIPE,
        stderr=found.slave,
        env={**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "80"},
    )
    out, _ = process.communicate(timeout=240)
    text = found.text
    found.close()
    assert process.returncode == 0
    assert json.loads(out)["plan"]["overhead"] == 1
    assert re.search(rf"measuring \d .*\d of 5, {LEFT}", text)
