"""The tape's manifest: of which model it is, how it was cut, and a checksum of every chunk; read strictly.

The chunk table is not in it: layout.py makes it again from the config and the chunk size, and its digest must agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.layout import TapeLayout

FORMAT = "k3ray trunk tape"
FORMAT_VERSION = 1
TAPE_NAME = "trunk.tape"
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 28
_ADVICE = "remove it and pack the model again with `k3ray pack`"


class TapeError(Failure):
    """A tape that is damaged, cut, or not made by this version."""

    def __init__(self, path: Path, found: str, expected: str, advice: str = _ADVICE) -> None:
        self.path = path
        super().__init__(f"{path}: found {found}, expected {expected}; {advice}")


class NoTape(TapeError):
    """A path at which there is no tape."""

    exit_code = 2

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, "no such folder", "the folder that `k3ray pack` made", "correct the path, or pack the model first"
        )


class TapeIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tape was made from and how.

    model: the folder's name, for messages. index_fingerprint: TensorIndex.fingerprint, over shard names, sizes and
    headers, for messages: a copy in other shards is the same model. config: config_fields. layout: digest of the chunk
    table. samples: for each tensor of the tape the digest of some of its rows (identity.py).
    """

    model: str
    index_fingerprint: str
    config: dict[str, Any]
    chunk_bytes: int
    total_bytes: int
    layout: str
    samples: list[str]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole document. checksums: CRC-32 of every chunk. digest: BLAKE2b of the document with an empty digest."""

    format: str
    version: int
    made_by: str
    identity: TapeIdentity
    checksums: list[int]
    digest: str


class _Versioned(msgspec.Struct):
    format: str
    version: int


def make_identity(
    config: ModelConfig, layout: TapeLayout, model: str, index_fingerprint: str, samples: Sequence[str]
) -> TapeIdentity:
    """The identity of a tape of this layout."""
    return TapeIdentity(
        model=model,
        index_fingerprint=index_fingerprint,
        config=config_fields(config),
        chunk_bytes=layout.chunk_bytes,
        total_bytes=layout.total_bytes,
        layout=layout_digest(layout),
        samples=list(samples),
    )


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """A config's fields as JSON gives them back, but for eos_token_id: where a text ends is no matter of weights."""
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    del fields["eos_token_id"]
    return fields


def layout_digest(layout: TapeLayout) -> str:
    """A digest over every number and name of the layout."""
    tensors = [(tensor.layer, tensor.short, tensor.dtype, tensor.rows, tensor.columns) for tensor in layout.tensors]
    chunks = [
        (
            chunk.layer,
            chunk.offset,
            chunk.nbytes,
            [(segment.tensor, segment.first_row, segment.rows, segment.offset) for segment in chunk.segments],
        )
        for chunk in layout.chunks
    ]
    return hashlib.blake2b(msgspec.json.encode((tensors, chunks)), digest_size=16).hexdigest()


def write_manifest(folder: Path, identity: TapeIdentity, checksums: Sequence[int]) -> Manifest:
    """Write the manifest beside and rename it, on the disk when this returns; raises OSError."""
    manifest = Manifest(FORMAT, FORMAT_VERSION, _our_version(), identity, list(checksums), "")
    manifest = msgspec.structs.replace(manifest, digest=_digest(manifest))
    beside = folder / f"{MANIFEST_NAME}.writing"
    with beside.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / MANIFEST_NAME)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a tape, every field typed and the digest proven; raises NoTape or TapeError."""
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise NoTape(folder)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES)
    except OSError as error:
        found = f"no manifest that can be read ({error.strerror})"
        raise TapeError(path, found, f"the folder that `k3ray pack` made, with {MANIFEST_NAME}") from None
    try:
        head = msgspec.json.decode(text, type=_Versioned)
        if head.format != FORMAT:
            raise TapeError(path, f"format {head.format[:80]!r}", repr(FORMAT))
        if head.version != FORMAT_VERSION:
            raise TapeError(path, f"a tape of version {head.version}", f"version {FORMAT_VERSION} of this k3ray")
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TapeError(path, f"a manifest that is damaged ({error})", "the one that `k3ray pack` wrote") from None
    if _digest(manifest) != manifest.digest:
        raise TapeError(path, "a manifest that was changed (its digest is another)", "the one `k3ray pack` wrote")
    return manifest


def _digest(manifest: Manifest) -> str:
    bare = msgspec.structs.replace(manifest, digest="")
    return hashlib.blake2b(msgspec.json.encode(bare), digest_size=16).hexdigest()


def _our_version() -> str:
    try:
        return version("k3ray")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
