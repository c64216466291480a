"""Every command line that help and documents show is understood as it is written, and the sources they name exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from k3ray.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("benchmarks", "cluster", "k3ray", "kernels", "scripts", "tests", "workers")
SOURCES = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
ELSEWHERE = ("configuration_", "modeling_", "encoding_", "tokenization_", "setup_worker.", "helper.", "outer.")


def understand(line: str) -> None:
    """Parse a command line, running nothing; what follows a comment sign is not of it."""
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "k3ray" and name in COMMANDS, line
    COMMANDS[name].make_context(name, arguments).close()


def shown(page: Path) -> list[str]:
    """The command lines of a page's blocks: after a prompt or at a line's beginning, indented or fenced."""
    block, fenced, lines = False, False, []
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        block = fenced or line.startswith("    ")
        found = re.fullmatch(r"\s*(?:\w*\$ )?(k3ray [a-z].*)", line)
        if block and found and "─" not in line:  # a picture
            lines.append(found[1])
    return lines


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_understood(name: str) -> None:
    epilog = COMMANDS[name].epilog
    assert epilog.startswith(f"Example: k3ray {name}")
    understand(epilog.removeprefix("Example: "))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    for parameter in COMMANDS[name].params:
        assert parameter.help and parameter.help.endswith("."), (name, parameter.name)


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_are_understood(page: Path) -> None:
    for line in shown(page):
        understand(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_sources_that_exist(page: Path) -> None:
    text = page.read_text()
    named = {word for word in re.findall(r"`([\w./-]+\.py)\b", text) if not word.startswith(ELSEWHERE)}
    linked = {word.split("#")[0] for word in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in word}
    gone = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in SOURCES)}
    assert not gone | {name for name in linked if name and not (page.parent / name).exists()}
