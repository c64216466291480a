"""docs/architecture.md says where everything is: every module is named there, and none that is gone."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.conftest import ROOT

FLOORS = ("k3ray", "cluster", "workers", "kernels")
WHOLE_FOLDERS = ("k3ray", "kernels")  # the floors of which a folder may be named for all that is in it


def rows_of(floor: str, document: str) -> list[list[str]]:
    """What each row of the floor's table in "Where everything is" names: files, patterns of files, folders."""
    section = document.split("\n## Where everything is\n")[1].split("\n## ")[0]
    table = section.split(f"**`{floor}/`**")[1].split("**`")[0]
    named = [re.findall(r"`([^` ]+(?:\.py|/))`", line) for line in table.splitlines() if line.startswith("|")]
    return [row for row in named if row]


def modules_of(floor: str) -> list[Path]:
    """Paths below the floor's folder; k3ray/ has links to the other floors."""
    paths = sorted(path.relative_to(ROOT / floor) for path in (ROOT / floor).rglob("*.py"))
    return [path for path in paths if path.name != "__init__.py" and path.parts[0] not in FLOORS]


def unnamed(floor: str, modules: list[Path], rows: list[list[str]]) -> list[Path]:
    """The modules that no row names; one in a folder is to be named in a row with its folder."""
    missing = []
    for module in modules:
        folders = [f"{folder}/" for folder in module.parts[:-1]]
        around = [row for row in rows if not folders or folders[0] in row]
        whole = bool(folders and around) and floor in WHOLE_FOLDERS
        if not whole and not any(fnmatchcase(module.name, name) for row in around for name in row):
            missing.append(module)
    return missing


def gone(floor: str, modules: list[Path], rows: list[list[str]]) -> list[str]:
    """The names that are of no module and no folder."""
    folders = {f"{path.name}/" for path in (ROOT / floor).rglob("*") if path.is_dir()}
    names = [module.name for module in modules]
    return [
        name
        for row in rows
        for name in row
        if (name not in folders if name.endswith("/") else not any(fnmatchcase(module, name) for module in names))
    ]


@pytest.mark.parametrize("floor", FLOORS)
def test_every_module_has_its_place_in_the_page(floor: str) -> None:
    rows, modules = rows_of(floor, (ROOT / "docs" / "architecture.md").read_text("utf-8")), modules_of(floor)
    assert len(modules) > 15 and len(rows) > 4
    assert unnamed(floor, modules, rows) == []
    assert gone(floor, modules, rows) == []


def test_what_is_missing_or_gone_is_found() -> None:
    table = "|a|`stage.py`, `hop_*.py`|\n|b|`tape/`: `lost.py`|"
    page = f"\n## Where everything is\n**`workers/`**\n\n{table}\n## Next\n|c|`x.py`|"
    rows = rows_of("workers", page)
    assert rows == [["stage.py", "hop_*.py"], ["tape/", "lost.py"]]
    modules = [Path(name) for name in ("stage.py", "hop_door.py", "new.py", "tape/ring.py", "tape/stage.py")]
    assert unnamed("workers", modules, rows) == [Path("new.py"), Path("tape/ring.py"), Path("tape/stage.py")]
    assert unnamed("kernels", modules, rows) == [Path("new.py")]
    assert gone("workers", modules, rows) == ["lost.py"]
    assert gone("workers", modules, [["tapes/", "tape/"]]) == ["tapes/"]
