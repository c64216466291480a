"""k3ray pack: the trunk and the head as one tape, which a run streams from the disk; or a proof of such a tape."""

from __future__ import annotations

from pathlib import Path

from k3ray.amounts import decimal_size
from k3ray.commands.terminal import Progress, say
from k3ray.environment import read_environment
from k3ray.model_source import find_model
from k3ray.workers.checkpoint.binding import Binding, bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.counted import counted
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.damaged_scales import refuse_damaged_scales
from k3ray.workers.tape.identity import changed_since, note_proven
from k3ray.workers.tape.manifest import MANIFEST_NAME
from k3ray.workers.tape.pack import pack
from k3ray.workers.tape.tape import Tape, open_tape
from k3ray.workers.tape.verify import verify


def run(model_dir: Path | None, out: Path, verify_bits: bool, config: Path | None = None) -> None:
    """Pack the model to the folder `out`, unless its tape is there already; with verify_bits compare every bit."""
    source = find_model(model_dir, None, read_environment())
    say(source.describe())
    index = open_index(source.model_dir)
    binding = bind(read_config(config or source.model_dir), index)
    with TensorReader(index) as reader:
        if (out / MANIFEST_NAME).exists():
            _open(out, binding, reader).file.close()
            if not verify_bits and (changed := changed_since(out, index)):
                say(f"warning: {changed}")
            done = f"{out}: holds the whole tape of this model already, nothing was written"
        else:
            done = _pack(binding, reader, out)
        if verify_bits:
            done = _verify(binding, reader, out)
    check = "" if verify_bits else f"; prove it with k3ray pack {source.model_dir} {out} --verify"
    say(f"{done}; next: k3ray generate {source.model_dir} --tape {out} --ids 1,2,3{check}")


def _pack(binding: Binding, reader: TensorReader, out: Path) -> str:
    with Progress("scales of experts") as progress:
        refuse_damaged_scales(binding, reader, progress.update)
    with Progress("packing") as progress:
        summary = pack(binding, reader, out, progress=progress.update, say=say)
    speed = summary.tape_bytes / 1e9 / max(summary.seconds, 1e-9)
    kept = f", {decimal_size(summary.kept_bytes)} of it kept from an earlier pack" if summary.kept_bytes else ""
    return (
        f"wrote {out}: {decimal_size(summary.tape_bytes)} in {counted(summary.num_chunks, 'chunk')} "
        f"({100 * summary.padding_bytes / summary.tape_bytes:.2f} % padding) in {summary.seconds:,.1f} s, "
        f"{speed:.2f} GB/s{kept}"
    )


def _verify(binding: Binding, reader: TensorReader, out: Path) -> str:
    tape = _open(out, binding, reader)
    with tape.file, Progress("verifying") as progress:
        summary = verify(tape, binding, reader, progress=progress.update)
    note_proven(out)
    speed = summary.tape_bytes / 1e9 / max(summary.seconds, 1e-9)
    return (
        f"{out}: all {decimal_size(summary.tape_bytes)} of {summary.num_tensors} matrices are the shards' to the last "
        f"bit ({summary.seconds:,.1f} s, {speed:.2f} GB/s)"
    )


def _open(out: Path, binding: Binding, reader: TensorReader) -> Tape:
    return open_tape(out, binding, reader, range(binding.config.num_hidden_layers + 1), say)
