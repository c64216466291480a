"""Whether a tape is of the model at hand: the config field by field, then sampled rows of every matrix.

Names, shapes and sizes are the same in every checkpoint of one architecture, so they prove nothing about the weights.
Four whole rows of each matrix, its first and last among them, do so for any weights that were trained or converted
otherwise, wherever the copy lies and however it is cut into shards. A checkpoint that differs in other rows only is not
told apart here: `k3ray pack --verify` compares every bit, and shards that were written after the tape are told.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.index_table import TensorIndex
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.layout import TapeLayout
from k3ray.workers.tape.manifest import MANIFEST_NAME, TapeIdentity, config_fields
from k3ray.workers.tape.order import TapeTensor, full_name

SAMPLED_ROWS = 4
MAX_LISTED = 6


class WrongTape(Failure):
    """A tape of another model."""

    exit_code = 2

    def __init__(self, path: Path, identity: TapeIdentity, model_dir: Path, why: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: this tape was packed from another model ({identity.model}) than {model_dir}: {why}. "
            "Use the tape of this model, or make it with `k3ray pack`"
        )


def sample_tensor(binding: Binding, reader: TensorReader, tensor: TapeTensor) -> str:
    """The digest of a few rows of one matrix in the shards."""
    name = full_name(binding, tensor)
    digest = hashlib.blake2b(digest_size=8)
    last = tensor.rows - 1
    for row in sorted({last * place // (SAMPLED_ROWS - 1) for place in range(SAMPLED_ROWS)}):
        digest.update(reader.read_row(name, row).data)
    return digest.hexdigest()


def sample_all(binding: Binding, reader: TensorReader, layout: TapeLayout) -> list[str]:
    """The digests of every matrix of the tape."""
    return [sample_tensor(binding, reader, tensor) for tensor in layout.tensors]


def refuse_other_config(path: Path, identity: TapeIdentity, config: ModelConfig, model_dir: Path) -> None:
    """Raise WrongTape, with the first fields that differ, unless the tape is of this (whole) config."""
    if differences := config_differences(identity.config, config_fields(config)):
        raise WrongTape(path, identity, model_dir, f"its config has {differences}")


def config_differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """The first fields that differ, with both values; empty when none does."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    listed = ", ".join(
        f"{name} {_show(theirs.get(name))} (here {_show(mine.get(name))})" for name in names[:MAX_LISTED]
    )
    return listed + (f" and {len(names) - MAX_LISTED} other fields" if len(names) > MAX_LISTED else "")


def refuse_other_weights(
    path: Path,
    identity: TapeIdentity,
    binding: Binding,
    reader: TensorReader,
    layout: TapeLayout,
    layers: Iterable[int],
) -> None:
    """Raise WrongTape when a sample of these layers' matrices is not what the shards hold."""
    wanted = set(layers)
    for tensor, sample in zip(layout.tensors, identity.samples, strict=True):
        if tensor.layer in wanted and sample_tensor(binding, reader, tensor) != sample:
            where = "the head" if tensor.layer == layout.head_layer else f"layer {tensor.layer}'s {tensor.short}"
            raise WrongTape(path, identity, reader.index.directory, f"{where} has other values")


def changed_since(folder: Path, index: TensorIndex) -> str:
    """What is said when shards were written after the tape was packed or last proven, a repair for instance; or empty.

    The manifest's own time is that moment. A copy of the checkpoint that was made later is told as well: the samples
    prove that it is this model, not that every row is.
    """
    proven_ns = (folder / MANIFEST_NAME).stat().st_mtime_ns
    later = [shard.name for shard in index.shards if shard.mtime_ns > proven_ns]
    if not later:
        return ""
    return (
        f"{folder}: {len(later)} of {len(index.shards)} shards, {later[0]} for one, were written after this tape was "
        "packed or proven, and only samples were compared: prove it with "
        f"k3ray pack {index.directory} {folder} --verify"
    )


def note_proven(folder: Path) -> None:
    """Keep that every bit of a tape was compared just now, where the folder can be written to."""
    with suppress(OSError):
        os.utime(folder / MANIFEST_NAME)


def _show(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:36]}..."
