"""One shard against what is known of it: its header and the index file's names for it; then its scale bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from k3ray.download.verdict import Problem
from k3ray.workers.checkpoint.header import ShardHeader, read_header
from k3ray.workers.checkpoint.header_json import HeaderError, show_name
from k3ray.workers.checkpoint.index_file import IndexFile
from k3ray.workers.checkpoint.tensors import count_nan_scales
from k3ray.workers.counted import counted

SCALE = ".weight_scale"
SHOWN = 3
READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ShardProof:
    """What one shard's header gave. names: a digest of its tensors' names. scale_bytes: of its scale tensors.

    header: the problems found; astray: how its names differ from the index file's, "" where they do not.
    """

    name: str
    num_tensors: int
    tensor_bytes: int
    names: str
    astray: str
    scale_bytes: int
    header: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class ScaleProof:
    """What one shard's scales gave. num_tensors: how many were read for NaN, of num_bytes."""

    num_tensors: int
    num_bytes: int
    nan: tuple[Problem, ...]


def prove_shard(path: Path, index: IndexFile | None) -> ShardProof:
    """Read one shard's header."""
    try:
        header = read_header(path)
    except (HeaderError, OSError) as error:
        text = str(error).removeprefix(f"{path}: ")
        return ShardProof(path.name, 0, 0, "", "", 0, (Problem(path.name, text),))
    nbytes = sum(header.kinds[int(kind)].nbytes for kind in header.kind_ids)
    digest = digest_of_names(header.names)
    stated = None if index is None else index.names_in(path.name).to_pylist()
    astray = "" if stated is None or digest_of_names(stated) == digest else _difference(header.names, stated)
    scale_bytes = sum(header.kinds[int(header.kind_ids[row])].nbytes for row in _scale_rows(header))
    return ShardProof(path.name, len(header.names), nbytes, digest, astray, scale_bytes, ())


def prove_scales(path: Path, read: Callable[[int], None]) -> ScaleProof:
    """Read one shard's scales, in the order of the file; `read` is told of every tensor's bytes."""
    try:
        return _nan_scales(read_header(path), read)
    except (HeaderError, OSError) as error:
        text = str(error).removeprefix(f"{path}: ")
        return ScaleProof(0, 0, (Problem(path.name, f"its scales cannot be read: {text}"),))


def digest_of_names(names: Iterable[str]) -> str:
    """The same for the same names in any order."""
    digest = blake2b(digest_size=16)
    for name in sorted(names):
        digest.update(name.encode() + b"\0")
    return digest.hexdigest()


def explain_strays(proofs: list[ShardProof], index: IndexFile) -> list[Problem]:
    """How shards differ from the index file; a shard that holds another one's tensors is told as such."""
    if not any(proof.astray for proof in proofs):
        return []
    owners: dict[str, str] = {}
    for shard in index.shard_names:
        owners.setdefault(digest_of_names(index.names_in(shard).to_pylist()), shard)
    holds = {proof.name: owners.get(proof.names) for proof in proofs if proof.astray}
    problems = []
    for proof in proofs:
        owner = holds.get(proof.name)
        if proof.astray and owner is not None:
            swapped = f", and {owner} holds this one's: the two are swapped" if holds.get(owner) == proof.name else ""
            problems.append(Problem(proof.name, f"holds the tensors of {owner}{swapped}"))
        elif proof.astray:
            problems.append(Problem(proof.name, proof.astray))
    return problems


def _difference(found: list[str], stated: list[str]) -> str:
    here, expected = set(found), set(stated)
    more, fewer = sorted(here - expected), sorted(expected - here)
    parts = []
    if more:
        parts.append(f"{counted(len(more), 'tensor')} that the index does not place here, such as {show_name(more[0])}")
    if fewer:
        parts.append(f"without {len(fewer)} that it does, such as {show_name(fewer[0])}")
    return "holds " + " and ".join(parts) if parts else "is stated with a tensor more than once in the index"


def _scale_rows(header: ShardHeader) -> list[int]:
    """The rows of the scale tensors, in the order of the file."""
    rows = [row for row, name in enumerate(header.names) if name.endswith(SCALE)]
    rows = [row for row in rows if header.kinds[int(header.kind_ids[row])].dtype == "U8"]
    return sorted(rows, key=lambda row: int(header.begins[row]))


def _nan_scales(header: ShardHeader, read: Callable[[int], None]) -> ScaleProof:
    """How many scale tensors there are, and those with a NaN byte."""
    wanted, num_bytes = _scale_rows(header), 0
    damaged: list[tuple[str, int]] = []
    with header.path.open("rb", buffering=0) as file:
        for row in wanted:
            nbytes = header.kinds[int(header.kind_ids[row])].nbytes
            count = _count_nan(file.fileno(), int(header.begins[row]), nbytes)
            if count:
                damaged.append((header.names[row], count))
            num_bytes += nbytes
            read(nbytes)
    if not damaged:
        return ScaleProof(len(wanted), num_bytes, ())
    listed = ", ".join(f"{show_name(name)} ({count} bytes)" for name, count in damaged[:SHOWN])
    more = f" and {len(damaged) - SHOWN} more" if len(damaged) > SHOWN else ""
    return ScaleProof(len(wanted), num_bytes, (Problem(header.path.name, f"NaN scales in {listed}{more}"),))


def _count_nan(descriptor: int, begin: int, nbytes: int) -> int:
    found = 0
    for offset in range(begin, begin + nbytes, READ_BYTES):
        count = min(READ_BYTES, begin + nbytes - offset)
        data = os.pread(descriptor, count, offset)
        if len(data) < count:
            raise OSError(0, f"it ends at byte {offset + len(data)} while it is read")
        found += count_nan_scales(np.frombuffer(data, dtype=np.uint8))
    return found
