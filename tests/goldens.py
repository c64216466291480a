"""The golden checkpoints' own record of what the official code computed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden checkpoint. arrays: golden.npz. prompts: golden.json's records."""

    path: Path
    arrays: dict[str, npt.NDArray[Any]]
    prompts: list[dict[str, Any]]

    def ids(self, prompt: int) -> list[int]:
        """The prompt's ids."""
        return self.arrays[f"p{prompt}_ids"].tolist()


def read_golden(path: Path) -> Golden:
    """Read everything that was recorded."""
    with np.load(path / "golden.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    return Golden(path, arrays, json.loads((path / "golden.json").read_text())["prompts"])
