"""The operator fixtures of another project's torch reference (../shared/data/ops), as tests read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Fixture:
    """One file: numbers as they are, arrays as float32, without the batch axis of one where `token` asks."""

    def __init__(self, path: Path) -> None:
        self.fields: dict[str, Any] = json.loads(path.read_text())
        tolerance = json.loads((path.parent / "MANIFEST.json").read_text())["tolerance"]
        self.rtol, self.atol = tolerance["fp32_rel"], tolerance["fp32_abs"]

    def __getitem__(self, name: str) -> Any:
        value = self.fields[name]
        if isinstance(value, dict):
            return np.array(value["data"], np.float32).reshape(value["shape"])
        return value

    def rows(self, name: str) -> Floats:
        """(tokens, everything else)."""
        value = self[name]
        value = value[0] if value.shape[0] == 1 and value.ndim > 2 else value
        return np.ascontiguousarray(value.reshape(len(value), -1))

    def part(self, prefix: str) -> Callable[[str], Floats]:
        """The arrays whose names start with a prefix, by the rest of the name."""
        return lambda name: np.asarray(self[prefix + name])

    def check(self, got: npt.NDArray[Any], name: str) -> None:
        """Within the manifest's tolerance, element by element."""
        np.testing.assert_allclose(got.reshape(-1), self[name].reshape(-1), rtol=self.rtol, atol=self.atol)

    def check_sum(self, got: npt.NDArray[Any], name: str) -> None:
        """The relative part taken of the largest element: for a sum of terms of that size which nearly cancel."""
        largest = float(np.abs(self[name]).max())
        np.testing.assert_allclose(
            got.reshape(-1), self[name].reshape(-1), rtol=0, atol=self.atol + self.rtol * largest
        )
