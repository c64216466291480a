"""Statements about files: the shards against the index, the index's total against the headers or the rules."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3ray.audit.artifact import Artifact
from k3ray.audit.claims import compared, number, said, some
from k3ray.audit.counting import Rules
from k3ray.audit.rules import Rule
from k3ray.audit.snapshot import KindRow, Letter, Statement
from k3ray.workers.checkpoint.header_json import show_name
from k3ray.workers.checkpoint.index_file import IndexFile
from k3ray.workers.checkpoint.index_table import TensorIndex
from k3ray.workers.checkpoint.names import Keys, NameTable, numbers_of
from k3ray.workers.counted import counted
from k3ray.workers.model.config_document import KDA, TEXT
from k3ray.workers.model.config_rules import RELEASED

_CHUNK = 1 << 16  # names turned into keys at a time, which bounds the temporaries
_LEAST_HEADER = 8 + 2  # its length, and {}


def file_statements(artifact: Artifact, rules: Rules, rows: Sequence[KindRow]) -> list[Statement]:
    """Everything that is said about the files."""
    stated = artifact.stated
    found = [_config(artifact), *_total(artifact, rows)]
    if stated is not None and artifact.index.has_shapes:
        found.append(_present(artifact, stated))
        found.append(_places(artifact.index, stated))
    if artifact.index.has_shapes:
        found.append(_filled(artifact))
    elif artifact.total_bytes is not None:
        found.append(_header_room(artifact, rules, artifact.total_bytes))
    return found


def _config(artifact: Artifact) -> Statement:
    """The fields that select the model, as they stand in config.json, beside the released values."""
    found, expected = [], []
    text = artifact.root.get(TEXT, artifact.root)
    for key, kda, released in RELEASED:
        places = [text.get(KDA, {}), artifact.root.get(KDA, {})] * kda + [text, artifact.root]
        found.append(f"{key} {json.dumps(next((place[key] for place in places if key in place), None))}")
        expected.append(f"{key} {json.dumps(released)}")
    subject = "fields that select the model"
    source = (
        "config.json; another value would have ended the audit, as would experts that are not MXFP4 in groups of 32"
    )
    return compared("files.config", "tensors", "O", subject, ", ".join(found), ", ".join(expected), source)


def _total(artifact: Artifact, rows: Sequence[KindRow]) -> list[Statement]:
    """The index's total_size, and the files'."""
    found = []
    by_headers = artifact.index.has_shapes
    known = all(row.bytes is not None for row in rows)
    total = sum(row.bytes or 0 for row in rows)
    stated = artifact.stated.stated_bytes if artifact.stated is not None else None
    subject = "bytes of tensors: total_size of the index, against "
    if stated is None or not known:
        why = "the index file states no total" if stated is None else "not every shape is known"
        found.append(said("files.tensor_bytes", "tensors", "U", subject + "the sum", why, "the index file"))
    else:
        letter: Letter = "O" if by_headers else "D"
        what, source = ("the headers", "the index file against the headers")
        if not by_headers:
            what, source = "the sum of the rules, vision included", "the index file against the rules of config.json"
        id = "files.tensor_bytes"
        found.append(compared(id, "tensors", letter, subject + what, number(stated), number(total), source, main=True))
    files = artifact.total_bytes
    if files is not None:
        shards = len(artifact.index.shards)
        source = "the files' sizes" if by_headers else "the published sizes beside the index"
        text = f"{number(files)} in {counted(shards, 'shard')}"
        found.append(said("files.bytes", "tensors", "O", "bytes of the shard files", text, source))
        if known and not artifact.missing:
            source += ", less the tensors' bytes"
            text = number(files - total)
            found.append(said("files.header_bytes", "tensors", "D", "bytes of the shards' headers", text, source))
    return found


def _filled(artifact: Artifact) -> Statement:
    """Whether each file is its header and its tensors' bytes, added up here once more from the index."""
    index = artifact.index
    sizes = np.array([kind.nbytes for kind in index.kinds], dtype=np.int64)
    tensors = np.zeros(len(index.shards), dtype=np.int64)
    np.add.at(tensors, index.columns.shard_ids, sizes[index.columns.kind_ids])
    full = sum(
        shard.file_bytes == artifact.header_bytes[shard.name] + held
        for shard, held in zip(index.shards, tensors.tolist(), strict=True)
    )
    shards = len(index.shards)
    subject = "shards that are as long as their header and their tensors"
    source = "every header and file size; a gap or an overlap would have ended the audit"
    return compared("files.headers", "tensors", "O", subject, f"{full} of {shards}", f"{shards} of {shards}", source)


def _present(artifact: Artifact, stated: IndexFile) -> Statement:
    named = len(stated.shard_names)
    missing = artifact.missing
    extra = sorted({shard.name for shard in artifact.index.shards} - set(stated.shard_names))
    found = f"{named - len(missing)} of {named}" + (f"; missing {some(missing)}" if missing else "")
    found += f"; not named: {some(extra)}" if extra else ""
    subject = "shards that the index file names"
    return compared("files.shards", "tensors", "O", subject, found, f"{named} of {named}", "the folder or server")


def _places(index: TensorIndex, stated: IndexFile) -> Statement:
    """Whether the index file places exactly the headers' tensors, each in its shard."""
    table = NameTable(index.names.templates)
    chunks = [table.add(stated.names.slice(low, _CHUNK)) for low in range(0, len(stated.names), _CHUNK)]
    keys: Keys = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.uint64)
    numbers = {shard.name: place for place, shard in enumerate(index.shards)}
    homes = np.repeat([numbers.get(name, -1) for name in stated.shard_names], np.diff(stated.starts))
    rows = np.minimum(np.searchsorted(index.columns.keys, keys), max(len(index) - 1, 0))
    here = index.columns.keys[rows] == keys if len(index) else np.zeros(len(keys), dtype=np.bool_)
    right = here & (index.columns.shard_ids[rows] == homes) if len(index) else here
    distinct = len(np.unique(keys[right]))
    problems = [
        f"{show_name(table.name(int(keys[place])))} is not where the index says" for place in np.flatnonzero(~right)[:3]
    ]
    unnamed = np.flatnonzero(~np.isin(index.columns.keys, keys))
    problems += [f"{show_name(index.name(int(row)))} is not in the index" for row in unnamed[:3]]
    more = "; " + "; ".join(problems) if problems else ""
    found = f"{number(len(keys))} names, {number(distinct)} in their place, {number(len(index))} in the headers{more}"
    count = number(len(index))
    expected = f"{count} names, {count} in their place, {count} in the headers"
    return compared("files.places", "tensors", "O", "the index file's names and places", found, expected, "the headers")


def _header_room(artifact: Artifact, rules: Rules, total: int) -> Statement:
    """Whether each published size leaves room for a header beside what the rules put into the shard."""
    index = artifact.index
    sizes = np.zeros(len(index.shards), dtype=np.int64)
    for template in index.templates():
        rows = index.rows_of(template)
        ruled = _tensor_sizes(rules.of(template), index.columns.keys[rows])
        np.add.at(sizes, index.columns.shard_ids[rows], ruled)
    room = np.array([shard.file_bytes for shard in index.shards], dtype=np.int64) - sizes
    enough = int(np.count_nonzero(room >= _LEAST_HEADER))
    shards = len(index.shards)
    subject = "shards whose published size is the rules' bytes and room for a header"
    found = f"{enough} of {shards}, with {number(int(room.min()))} to {number(int(room.max()))} bytes of header"
    expected = f"{shards} of {shards}, with {number(int(room.min()))} to {number(int(room.max()))} bytes of header"
    source = "the published sizes against the index and the rules"
    return compared("files.header_room", "tensors", "D", subject, found, expected, source)


def _tensor_sizes(ruled: list[Rule], keys: Keys) -> npt.NDArray[np.int64]:
    """Bytes of each tensor of one template, 0 where no rule names its layer."""
    first, _ = numbers_of(keys)
    sizes = np.zeros(len(keys), dtype=np.int64)
    for rule in ruled:
        sizes[np.isin(first, rule.layers) if rule.layers is not None else slice(None)] = rule.tensor_bytes
    return sizes
