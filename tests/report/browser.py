"""A headless Chromium, and what a page looks like in it."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service

REQUIRED = "ROTOR_BROWSER"
"""The environment variable that, where it is set, makes a browser that is there but does not start a failure."""

# fmt: off
_FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]
# fmt: on
_LOOK = Path(__file__).with_name("look.js").read_text(encoding="utf-8")


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """The browser, which keeps its files in `profile`; the test is skipped where there is none."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        opened = webdriver.Chrome(options=options, service=Service(driver))
    except WebDriverException as error:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip(f"chromium does not start: {error.msg}")
    try:
        yield opened
    finally:
        opened.quit()


def show(driver: webdriver.Chrome, page: Path, width: int, scheme: str) -> None:
    """Open `page` on a screen of this width, in a "light" or "dark" colour scheme."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    preference = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", preference)
    driver.get_log("performance")
    driver.get_log("browser")
    driver.get(page.as_uri())


def requests(driver: webdriver.Chrome) -> list[str]:
    """The addresses that were asked for since the page was opened, its own first."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def look(driver: webdriver.Chrome) -> dict[str, Any]:
    """What `look.js` finds: the widths, and the texts that are cut off, on each other, or hard to read."""
    found: dict[str, Any] = driver.execute_script(_LOOK)
    return found
