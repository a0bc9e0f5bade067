"""The blocks of the README and of docs/ run, page by page, and print what the pages say."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from rotor_cli.main import main
from tests.docs.pages import ROOT, Block, blocks, commands, pages, words

MODEL_FILE = ROOT / "docs" / "model-file.md"
RUN = ("python", "console")
DATA = ("json", "text", "")


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


LONG = "batch capture compile estimate memory-budget model-file out-of-memory pipelines report strategies"
"""Pages whose blocks take longest."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page.stem in LONG.split() else page for page in pages()],
    ids=names,
)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(MODEL_FILE):  # the files that other pages speak of
        if block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.reason is not None or block.kind not in RUN:
            continue
        if block.kind == "console":
            _run_commands(block)
        elif block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
        else:
            exec(compile(block.text, page.name, "exec"), names)
    _check_comments(page, capsys.readouterr().out)


def _run_commands(block: Block) -> None:
    for command in commands(block.text):
        program, *arguments = shlex.split(command.line)
        assert program == "rotor-plan"
        if "--plot" in arguments and find_spec("matplotlib") is None:  # the extra `plot`, which tests can do without
            del arguments[(at := arguments.index("--plot")) : at + 2]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == command.exit_code, (command.line, result.output, result.exception)
        printed = words(result.output)
        for line in command.shown:
            missing = [word for word in words(line) if word not in printed and word not in CHANGING]
            assert not missing, f"{command.line} does not print {missing} of {line!r}, but:\n{result.output}"


CHANGING = frozenset({"checkpointed", "recomputed", "stored", "every", "layers", "level", "sqrt", "yes"})
"""What a plan does with a stage depends on measured times."""


def _check_comments(page: Path, printed: str) -> None:
    """`print(x)  # 266` prints just that; of `print(x)  # text …`, the words are printed, whatever the numbers."""
    for block in blocks(page):
        if block.kind != "python" or block.reason is not None or block.file is not None:
            continue
        for text in re.findall(r"^ *print\(.*\)  # (.+)$", block.text, re.MULTILINE):
            if not words(text):
                assert text in printed.splitlines(), f"{page.name}: {text!r} is not printed:\n{printed}"
            elif text.endswith("…"):
                missing = [word for word in words(text) if word not in words(printed)]
                assert not missing, f"{page.name}: {missing} of {text!r} is not printed:\n{printed}"


@pytest.mark.parametrize("page", pages(), ids=names)
def test_what_is_not_run_says_why_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(blocks(page)) * 2 == text.count("\n```")
    for block in blocks(page):
        assert block.reason or block.kind in (*RUN, *DATA), f"{page.name}: {block.text}"
    # Indented commands would not be seen here. The two of the README are read by .ci/run.
    stray = re.findall(r"^    (?:rotor-plan|python|pip|torchrun) .*", text, re.MULTILINE)
    assert all(page.name == "README.md" and "<!--" in text for _ in stray), stray
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_reached_from_the_index_and_the_index_from_the_readme() -> None:
    index, *_ = (path for path in pages() if path.parent.name == "docs" and path.name == "README.md")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index.read_text(encoding="utf-8")))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
