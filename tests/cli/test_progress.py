"""What a terminal shows while the command works, and where it shows nothing."""

import json
import os
import pty
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from threading import Thread
from types import SimpleNamespace

import pytest

from rotor_cli.main import main
from rotor_py.report import progress
from rotor_py.report.progress import Activities, activities
from rotor_solver.jit_policy import PREPARING

SLOW = """
import time
import torch

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.001)
        return super().forward(x)

model, sample = torch.nn.Sequential(*[Slow(16 + i, 17 + i) for i in range(5)]), torch.randn(64, 16)
"""
_markers = count()


class Terminal:
    """A pseudo-terminal, which stands for stderr while a test function runs `on` it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.stream = os.fdopen(os.dup(self.slave), "w")
        self._written = bytearray()
        self._reader = Thread(target=self._keep, daemon=True)  # writes block until they are read
        self._reader.start()

    def _keep(self) -> None:
        with suppress(OSError):  # the other end is closed
            while part := os.read(self.master, 65536):
                self._written += part

    def on(self) -> None:
        """To be called by the test itself: pytest puts streams of its own in place before every phase of a test."""
        sys.stderr = self.stream

    def read(self) -> str:
        marker = f"\x1b[{next(_markers)}z".encode()
        os.write(self.slave, marker)
        deadline = time.monotonic() + 20
        while marker not in self._written and time.monotonic() < deadline:
            time.sleep(0.001)
        return re.sub(r"\x1b\[[0-9]+z", "", self._written.decode())

    @property
    def text(self) -> str:
        """What was written, without the codes that move and colour."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.read())

    def close(self) -> None:
        self.stream.close()
        os.close(self.slave)
        self._reader.join()
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch) -> Iterator[Terminal]:
    found = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    yield found
    found.close()


@pytest.fixture
def run(monkeypatch, capfd) -> Callable[..., str]:
    """The command in this process, without patience; what it writes to stdout."""
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REDRAWN_SECONDS", 0.0)

    def run(*arguments: object) -> str:
        main([str(argument) for argument in arguments], standalone_mode=False)
        return capfd.readouterr().out

    return run


def test_the_time_left_is_that_of_the_rest_at_the_pace_so_far(terminal: Terminal) -> None:
    terminal.on()
    clock = SimpleNamespace(now=100.0)
    shown = Activities(True, lambda: clock.now)
    shown.doing("measuring")(0, 10, "x")
    clock.now += 6
    shown.doing("measuring")(2, 10, "x")
    clock.now += 3
    shown.doing("measuring")(3, 10, "x")
    assert "0:00:21" in terminal.text
    # Other work, other totals and fewer parts done each begin a new estimate.
    for verb, done, total in (("solving", 3, 10), ("measuring", 3, 11), ("measuring", 1, 11)):
        clock.now += 100
        before = len(terminal.text)
        shown.doing(verb)(done, total, "x")
        assert "-:--:--" in terminal.text[before:]
        for number in (1, 2):
            clock.now += 4
            shown.doing(verb)(done + number, total, "x")
        assert f"0:00:{4 * (total - done - 2)}" in terminal.text[before:]
    shown.stop()


def test_a_line_says_what_is_done_and_how_much_within_the_terminal_and_before_a_part_is(terminal, monkeypatch) -> None:
    terminal.on()
    clock = SimpleNamespace(now=100.0)
    shown = Activities(True, lambda: clock.now)
    tell = shown.doing("measuring")
    tell(0, 8, "0.conv")
    assert terminal.read() == ""  # not yet a second
    clock.now += 30
    tell(3, 8, "blocks[b].3.conv")
    assert "measuring blocks[b].3.conv" in terminal.text
    assert "3/8" in terminal.text
    clock.now += 3000
    tell(4, 8, "encoder.layers." * 20)
    shown.doing("solving")(120_000, 480_000, "5 slots")
    assert "solving 5 slots" in terminal.text
    assert "120000/480000" in terminal.text
    # The solver's kernels are compiled right after a table is full: the line must not stand at 100 %.
    shown.doing("solving")(480_000, 480_000, "5 slots")
    before = len(terminal.text)
    shown.doing("solving")(0, 0, PREPARING)
    assert "solving (preparing the solver, once on this machine)" in terminal.text[before:]
    assert "480000" not in terminal.text[before:]
    shown.stop()
    assert terminal.read().endswith("\x1b[2K")  # the line is erased
    before = len(terminal.text)
    tell(4, 8, "late")
    assert len(terminal.text) == before
    assert max(map(len, re.split(r"[\r\n]+", terminal.text))) <= 80
    terminal.on()
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.05)
    with activities() as shown:
        shown.doing("measuring")(0, 8, "first")
        deadline = time.monotonic() + 20
        while "measuring first" not in terminal.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "0/8" in terminal.text


def test_short_work_quiet_and_a_pipe_show_nothing(terminal: Terminal, run, model_file, capfd, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        main([model_file(), "--mem-limit", "1GB", "--json", "-"], standalone_mode=False)
        assert capfd.readouterr().err == "", "also where colours are forced"
    terminal.on()
    assert "fits" in run(model_file(), "--mem-limit", "1GB", "--quiet")
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 60.0)
    assert "fits" in run(model_file(), "--mem-limit", "1GB")
    assert terminal.read() == ""


def test_long_work_shows_what_is_done_and_the_time_left_and_an_error_is_on_a_new_line(terminal, run, model_file):
    terminal.on()
    options = ("--max-overhead", "30%", "--compare", "--verify", "--json", "-")
    report = json.loads(run(model_file(SLOW, "slow.py"), *options))
    assert report["verify"]["max_grad_difference"] == 0
    for words in (
        "loading ", "measuring 0 ", "2/5", "measuring 4 ", "sweeping sqrt", "sweeping 5 stages", "limits",
        "comparing revolve", "comparing recompute-all", "verifying: a step with the plan", "verifying: a plain step",
    ):  # fmt: skip
        assert words in terminal.text, words
    assert re.search(r"measuring 3 .*3/5 0:\d\d:\d\d", terminal.text)
    with pytest.raises(Exception, match="a limit of"):
        run(model_file(SLOW, "slow.py"), "--mem-limit", "19kB")
    assert terminal.read().endswith("\x1b[2K")
