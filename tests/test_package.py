"""What users install and read: the wheel holds every package and the embedded model, and the README's example runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_the_wheel_holds_every_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "build", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (
        ("k3ray", "k3ray"),
        ("kernels", "k3ray/kernels"),
        ("workers", "k3ray/workers"),
        ("cluster", "k3ray/cluster"),
    ):
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            linked = folder == "k3ray" and inside.parts[0] in ("kernels", "workers", "cluster")
            if path.is_file() and not linked and "__pycache__" not in inside.parts:
                assert f"{package}/{inside}" in names, f"{path} is not in the wheel"


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"k3ray"}
    for folder in ("kernels", "workers", "cluster"):
        found |= {
            f"k3ray.{path.parent.relative_to(ROOT)}".replace("/", ".") for path in (ROOT / folder).rglob("__init__.py")
        }
    found |= {
        f"k3ray.{path.parent.name}" for path in (ROOT / "k3ray").glob("*/__init__.py") if not path.parent.is_symlink()
    }
    assert listed == found


@pytest.mark.ray
def test_the_readme_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    exec(compile(example, "README.md", "exec"), {})
    assert "[" in capsys.readouterr().out
