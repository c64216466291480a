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
    if kind := _other_kind(contents):  # its header would be taken for logits
        raise LogitsFileFailure(f"{path}: found {kind}, expected raw float32, as k3ray generate --dump-logits writes")
    if not contents or len(contents) % 4:
        raise LogitsFileFailure(f"{path}: found {len(contents)} bytes, expected little-endian float32, 4 bytes each")
    return np.frombuffer(contents, "<f4")


def _other_kind(contents: bytes) -> str:
    """What else these bytes are, as far as their beginning tells; empty for what may be logits."""
    if contents.startswith((b"\x93NUMPY", b"PK\x03\x04")):
        return "a file of numpy's (rename it to .npy or .npz)"
    if contents.startswith(b"k3ray state file"):
        return "a saved state"
    header = int.from_bytes(contents[:8], "little")
    if contents[8:9] == b"{" and 2 <= header <= len(contents) - 8:
        return "a safetensors file"
    # sixteen floats of nothing but printable bytes: less likely by chance than 1e-20
    is_text = len(contents) >= 64 and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in contents[:64])
    return "a text" if is_text else ""


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
        if _only_numbers(document):
            return _floats(str(path), np.array(document, np.float64))
    except (ValueError, OverflowError, RecursionError):
        pass
    raise LogitsFileFailure(f"{path}: expected numbers, or rows of numbers of one length")


def _only_numbers(value: Any) -> bool:
    """Whether there is nothing but numbers below: numpy would take "1.5" and true for numbers, too."""
    return all(map(_only_numbers, value)) if isinstance(value, list) else type(value) in (int, float)


def _floats(name: str, values: npt.NDArray[Any]) -> Floats:
    if values.dtype.kind != "f" or values.dtype.itemsize > 8:  # all is compared in double
        raise LogitsFileFailure(f"{name}: found {values.dtype}, expected logits in float16, float32 or float64")
    return values
