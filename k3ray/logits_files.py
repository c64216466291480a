"""Reads logits from the files that people have: raw float32, .npy, .npz, .json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.workers.failure import Failure

Floats = npt.NDArray[np.floating[Any]]


class LogitsFileFailure(Failure):
    """A file that holds no logits, or not in a form that is understood."""

    exit_code = 2


def read_logits(name: str) -> Floats:
    """Return the logits in a file; `FILE.npz:array` names one array of several. Raises LogitsFileFailure.

    Raw files, of any other ending, are little-endian float32 as `k3ray generate --dump-logits` writes: (vocab,).
    """
    path, array = _split(name)
    if not path.is_file():
        raise LogitsFileFailure(f"{path}: there is no such file; name what k3ray generate --dump-logits wrote")
    try:
        if path.suffix.lower() in (".npy", ".npz"):
            return _floats(name, _numpy(name, path, array))
        if path.suffix.lower() == ".json":
            return _json(path)
        contents = path.read_bytes()
    except OSError as error:
        raise LogitsFileFailure(f"{path}: {error.strerror}; name a file that can be read") from None
    if contents.startswith((b"\x93NUMPY", b"PK\x03\x04")):  # its header would be taken for logits
        raise LogitsFileFailure(f"{path}: found a file of numpy's, expected raw float32; rename it to .npy or .npz")
    if not contents or len(contents) % 4:
        raise LogitsFileFailure(f"{path}: found {len(contents)} bytes, expected little-endian float32, 4 bytes each")
    return np.frombuffer(contents, "<f4")


def _split(name: str) -> tuple[Path, str | None]:
    head, separator, array = name.rpartition(":")
    return (Path(head), array) if separator and head.lower().endswith(".npz") else (Path(name), None)


def _numpy(name: str, path: Path, array: str | None) -> npt.NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            names = list(loaded.files)
            if array is None and len(names) == 1:
                array = names[0]
            if array is not None and array in names:
                found: npt.NDArray[Any] = loaded[array]
                return found
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - numpy and zipfile raise many kinds for a damaged file
        raise LogitsFileFailure(f"{path}: cannot be read as {path.suffix} ({error}); make it again") from None
    asked = "which of them is not said" if array is None else f"none is named {array!r}"
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    raise LogitsFileFailure(f"{name}: {len(names)} arrays and {asked}: write {path}:NAME with one of {listed}")


def _json(path: Path) -> Floats:
    """Numbers, or rows of numbers, alone or under "logits"."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LogitsFileFailure(f"{path}: not JSON ({error})") from None
    if isinstance(document, dict):
        if "logits" not in document:
            report = "the report of a run, which holds ids and no logits" if "generated_ids" in document else "none"
            raise LogitsFileFailure(
                f'{path}: found {report}, expected numbers under "logits"; k3ray generate --dump-logits writes them'
            )
        document = document["logits"]
    try:
        return _floats(str(path), np.array(document, np.float64))
    except (TypeError, ValueError, OverflowError):
        raise LogitsFileFailure(f"{path}: expected numbers, or rows of numbers of one length") from None


def _floats(name: str, values: npt.NDArray[Any]) -> Floats:
    if values.dtype.kind != "f":
        raise LogitsFileFailure(f"{name}: found {values.dtype}, expected floating-point logits")
    return values
