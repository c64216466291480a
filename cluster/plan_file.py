"""plan.json: a placement written down and read back strictly, for the model that it was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from k3ray.cluster.placement import Placement
from k3ray.cluster.plan_check import find_problems
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.manifest import config_fields

FORMAT, FORMAT_VERSION = "k3ray cluster plan", 3
MAX_PLAN_BYTES = 1 << 26


class PlanFileFailure(Failure):
    """A plan that cannot be read, was changed by hand into nonsense, or is of another model."""

    exit_code = 2

    def __init__(self, path: Path, found: str, expected: str) -> None:
        self.path = path
        super().__init__(f"{path}: found {found}, expected {expected}; make it again with `k3ray plan --out`")


@dataclass(frozen=True, slots=True)
class _Document:
    format: str
    version: int
    model: str  # digest of the config's fields
    placement: Placement


def _unknown_fields(found: Any, known: Any, where: str = "") -> Iterator[str]:
    """The fields of a document that reading it has left out, as paths."""
    if isinstance(found, dict) and isinstance(known, dict):
        for name, value in found.items():
            if name not in known:
                yield f"{where}.{name}".removeprefix(".")
            else:
                yield from _unknown_fields(value, known[name], f"{where}.{name}")
    elif isinstance(found, list) and isinstance(known, list):
        for place, (one, other) in enumerate(zip(found, known, strict=True)):
            yield from _unknown_fields(one, other, f"{where}[{place}]")


def config_digest(config: ModelConfig) -> str:
    """What tells one architecture from another: every size and switch of the config."""
    return hashlib.blake2b(msgspec.json.encode(sorted(config_fields(config).items())), digest_size=16).hexdigest()


def plan_record(config: ModelConfig, placement: Placement) -> dict[str, Any]:
    """The document as plain values."""
    return asdict(_Document(FORMAT, FORMAT_VERSION, config_digest(config), placement))


def write_plan(path: Path, config: ModelConfig, placement: Placement) -> None:
    """Write beside and rename; raises PlanFileFailure where the folder does not take it."""
    text = msgspec.json.format(msgspec.json.encode(plan_record(config, placement)), indent=1) + b"\n"
    beside = path.with_name(f".{path.name}.writing")
    try:
        beside.write_bytes(text)
        beside.replace(path)
    except OSError as error:
        raise PlanFileFailure(path, f"no file that can be written ({error.strerror})", "a folder of yours") from None


def read_plan(path: Path, config: ModelConfig) -> Placement:
    """The placement in the file: every field known and typed, of this model, and sound (plan_check.py).

    Raises PlanFileFailure.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PLAN_BYTES)
    except OSError as error:
        raise PlanFileFailure(path, f"no file that can be read ({error.strerror})", "what `k3ray plan` wrote") from None
    try:
        raw = msgspec.json.decode(text)
        if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (FORMAT, FORMAT_VERSION):
            raise PlanFileFailure(path, "another kind of file or version", f"{FORMAT!r}, version {FORMAT_VERSION}")
        document = msgspec.convert(raw, type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PlanFileFailure(path, f"no plan ({error})", "every field, each of its type") from None
    unknown = next(_unknown_fields(raw, msgspec.json.decode(msgspec.json.encode(asdict(document)))), None)
    if unknown is not None:
        raise PlanFileFailure(path, f"the field {unknown}, which is not known", "the fields that this version writes")
    if document.model != config_digest(config):
        raise PlanFileFailure(path, "the plan of another model", "a plan that was made for this one")
    problem = next(find_problems(document.placement, config), None)
    if problem is not None:
        raise PlanFileFailure(path, *problem)
    return document.placement
