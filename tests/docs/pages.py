"""The pages of the documentation as blocks that can be run."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `reason` is why it is not run, if it is not."""

    kind: str
    text: str
    reason: str | None

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, if its first line is a comment that says so."""
        match = _FILE.match(self.text) if self.kind == "python" else None
        return match[1] if match else None


@dataclass(frozen=True, slots=True)
class Command:
    """A line `$ rotor-plan …  # exit 3` and the lines of output that are shown below it."""

    line: str
    exit_code: int
    shown: list[str]


def pages() -> list[Path]:
    found = sorted((ROOT / "docs").glob("*.md"), key=lambda path: (path.name == "README.md", path.name))
    return [ROOT / "README.md", *found]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(match["kind"], match["text"], match["reason"]) for match in _BLOCK.finditer(text)]


def commands(text: str) -> list[Command]:
    found: list[Command] = []
    for line in filter(None, text.splitlines()):
        if line.startswith("$ "):
            command, _, code = line.removeprefix("$ ").partition("  # exit ")
            found.append(Command(command, int(code or 0), []))
        else:
            found[-1].shown.append(line)
    return found


def words(text: str) -> list[str]:
    """What stays the same from run to run: words of letters, without numbers and units."""
    return [word for word in re.findall(r"[^\W\d_]+", text) if len(word) > 2]
