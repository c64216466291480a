"""What runs in one process: the versions that decide its bits, and what an actor's load answers of it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version

import numba
import numpy as np
import pyarrow as pa
import ray


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What runs in one actor's process. note: what could not be bound to its memory node, if anything."""

    pid: int
    versions: dict[str, str]
    note: str = ""


def versions() -> dict[str, str]:
    """Return the versions that two processes must share to give the same bits."""
    return {
        "python": platform.python_version(),
        "k3ray": version("k3ray"),
        "ray": ray.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "pyarrow": pa.__version__,
    }
