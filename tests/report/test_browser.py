"""The page in a browser: nothing is cut off, on top of something else, or hard to read; and it does what it offers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium: pip install 'rotor-plan[test]'")

from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

from rotor_cli.facts import Facts
from rotor_py import Checkpointable, Report, format_bytes
from rotor_py.report.report import sweep_of
from rotor_py.validate.comparison import leanest_of_each
from tests.report.browser import chromium, look, requests, show


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def swept(model: Checkpointable, report: Report) -> Report:
    facts = Facts(report.title, report.device, model.mem_limit, report.budget, report.measurement, report.sequence)
    return replace(report, sweep=sweep_of(report, 500, leanest_of_each(facts, model.model, 500)))


@pytest.fixture(scope="module")
def pages(report: Report, swept: Report, mixed: Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    report.to_html(folder / "plain.html")
    swept.to_html(folder / "swept.html", ("measured peak 1.00 GB",), usage="model = Checkpointable(" + "model, " * 30)
    over = replace(report, mem_limit=report.peak_bytes // 2, title="A" * 120)
    over.to_html(folder / "over.html")
    replace(mixed, sweep=swept.sweep).to_html(folder / "mixed.html")
    head = '<!doctype html><meta name="viewport" content="width=device-width"><title>notebook</title><h1>Cell</h1>'
    notebook = head + report._repr_html_()
    (folder / "notebook.html").write_text(notebook, encoding="utf-8")
    return {page.stem: page for page in folder.iterdir()}


def assert_good(seen: dict[str, Any]) -> None:
    assert seen["texts"] > 100
    assert seen["width"] <= seen["screen"]
    assert [seen[each] for each in ("cut", "overlapping", "faint")] == [[], [], []]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("name", ["swept", "over", "mixed"])
def test_every_text_can_be_read(driver: Chrome, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    show(driver, pages[name], width, scheme)
    assert_good(look(driver))


def test_a_phone_shows_the_verdict_whole_pictures_and_what_happens(driver, pages, report) -> None:
    show(driver, pages["swept"], 340, "light")
    assert inside(driver, driver.find_element(By.TAG_NAME, "h1"), None)
    shown = [picture for picture in driver.find_elements(By.TAG_NAME, "svg") if picture.is_displayed()]
    assert [picture.get_attribute("id") for picture in shown] == ["curve-phone", "memory-phone", "schedule-phone"]
    for picture in shown:
        assert inside(driver, picture, picture.find_element(By.XPATH, ".."))
    actions = driver.find_elements(By.CSS_SELECTOR, "tr > :last-child")
    box = driver.find_element(By.XPATH, "//table/..")
    assert [action.text for action in actions] == ["what happens", *report.actions()]
    for action in actions[:3]:
        assert inside(driver, action, box)
    show(driver, pages["plain"], 390, "dark")
    driver.find_elements(By.CSS_SELECTOR, "#memory-phone .column")[2].click()
    said = driver.find_element(By.CSS_SELECTOR, "[data-for=memory]").text
    assert "while it runs" in said, "a finger does what a mouse does"


def test_a_notebook_shows_the_same_in_a_frame(driver: Chrome, pages: dict[str, Path]) -> None:
    show(driver, pages["notebook"], 390, "light")
    outside = driver.find_element(By.CSS_SELECTOR, "h1").value_of_css_property("font-size")
    driver.switch_to.frame(driver.find_element(By.TAG_NAME, "iframe"))
    assert_good(look(driver))
    assert driver.find_element(By.ID, "curve-phone").is_displayed()
    heads(driver)["kept"].click()
    assert heads(driver)["kept"].get_attribute("aria-sort") == "ascending"
    driver.switch_to.default_content()
    assert outside == "32px", "the page's styles stay in the frame"
    assert driver.get_log("browser") == []


def test_pointing_at_memory_and_schedule_says_operation_and_bytes(driver, pages, report) -> None:
    show(driver, pages["plain"], 1280, "light")
    columns = driver.find_elements(By.CSS_SELECTOR, "#memory .column")
    operations = list(map(str, report.sequence))
    assert len(columns) == len(operations)
    for at in (0, len(columns) // 2):
        said = point_at(driver, columns[at], "memory")
        assert said.startswith(f"{operations[at]} ")
        assert " kB while it runs, " in said
        assert "fixed part " in said
    cells = driver.find_elements(By.CSS_SELECTOR, "#schedule .ran")
    assert len(cells) == len(operations)
    assert point_at(driver, cells[3], "schedule").startswith(f"{operations[3]} ")


def test_pointing_at_the_curve_says_limit_peak_and_time_and_asks_for_nothing_but_the_page(driver, pages, swept) -> None:
    show(driver, pages["swept"], 1280, "light")
    points = swept.sweep.points
    columns = driver.find_elements(By.CSS_SELECTOR, "#curve .column")
    assert len(columns) == len(points) + 1
    least = format_bytes(points[0].mem_limit)
    assert point_at(driver, columns[0], "curve") == f"no plan needs less than {least}"
    said = point_at(driver, columns[1], "curve")
    assert said.startswith(f"a limit from {least} to {format_bytes(points[1].mem_limit)}: peak {least}, ")
    assert f"{points[0].overhead - 1:+.1%} time" in said
    plan = point_at(driver, driver.find_element(By.CSS_SELECTOR, "#curve .plan"), "curve")
    assert plan.startswith(f"this plan: peak {format_bytes(swept.peak_bytes)}, ")
    mark = point_at(driver, driver.find_element(By.CSS_SELECTOR, "#curve .mark"), "curve")
    assert mark.split(":")[0] in {point.name for point in swept.sweep.strategies}
    heads(driver)["forward"].click()
    assert requests(driver) == [pages["swept"].as_uri()], "nothing else is asked for"
    assert driver.get_log("browser") == []


def test_the_heads_of_the_table_sort_it_both_ways(driver: Chrome, pages: dict[str, Path], report: Report) -> None:
    show(driver, pages["plain"], 1280, "light")
    costs, head = [cost.backward_seconds for cost in report.measurement.stages], heads(driver)
    for expected in (sorted(costs), sorted(costs, reverse=True)):
        head["backward"].click()
        assert [costs[stage] for stage in order(driver)] == expected
    head["#"].click()
    assert order(driver) == list(range(len(costs))), "9 stands before 10"
    head["#"].find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert order(driver) == list(reversed(range(len(costs))))
    head["stage"].find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    assert head["stage"].get_attribute("aria-sort") == "ascending"
    assert head["#"].get_attribute("aria-sort") is None


def point_at(driver: Chrome, element: Any, picture: str) -> str:
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
    box = driver.execute_script("return arguments[0].getBoundingClientRect().toJSON()", element)
    middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **middle})
    return str(driver.find_element(By.CSS_SELECTOR, f"[data-for={picture}]").text)


def inside(driver: Chrome, element: Any, box: Any) -> bool:
    """Whether all of the element is seen in the box, or in the first screen of the page, without any scrolling."""
    code = """const screen = {left: 0, top: 0, right: innerWidth, bottom: innerHeight};
    const {left, top, right, bottom} = arguments[1]?.getBoundingClientRect() ?? screen;
    const it = arguments[0].getBoundingClientRect(), within = it.left >= left && it.right <= right;
    return it.width > 0 && within && it.top >= top && it.bottom <= bottom"""
    return bool(driver.execute_script(code, element, box))


def heads(driver: Chrome) -> dict[str, Any]:
    return {head.text.split(" ")[0]: head for head in driver.find_elements(By.TAG_NAME, "th")}


def order(driver: Chrome) -> list[int]:
    code = "return [...document.querySelectorAll('tbody td:first-child')].map(cell => Number(cell.dataset.value))"
    return list(driver.execute_script(code))
