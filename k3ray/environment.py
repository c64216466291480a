"""The one file that reads the environment; an unknown or malformed value is an error, never a default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.failure import Failure


class EnvironmentFailure(Failure):
    """A variable whose value is not understood."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says. model_dir: K3_MODEL_DIR. tokenizer: K3_TOK_FILES. threads: OMP_NUM_THREADS.

    ray_address: RAY_ADDRESS. None where a variable is unset or empty.
    """

    model_dir: Path | None
    tokenizer: Path | None
    threads: int | None
    ray_address: str | None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables (those of the process by default); EnvironmentFailure names the one that is malformed."""
    found = os.environ if variables is None else variables
    return Environment(
        model_dir=_path(found, "K3_MODEL_DIR"),
        tokenizer=_path(found, "K3_TOK_FILES"),
        threads=_threads(found),
        ray_address=found.get("RAY_ADDRESS") or None,
    )


def _path(variables: Mapping[str, str], name: str) -> Path | None:
    text = variables.get(name)
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.exists():
        raise EnvironmentFailure(f"{name}={text}: there is no such file or folder; correct it or unset it")
    return path


def _threads(variables: Mapping[str, str]) -> int | None:
    text = variables.get("OMP_NUM_THREADS")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise EnvironmentFailure(f"OMP_NUM_THREADS={text}: expected a number from 1 to 4096; correct or unset it")
    return int(text)
