"""A synthetic checkpoint with the released widths and its tape: given, or made for a benchmark and removed after it."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import released_spec
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.pack import pack

LAYERS, EXPERTS = 5, 24  # layer 0 dense, KDA and MLA layers of experts
MODEL_BYTES, TAPE_BYTES = 12_905_000_000, 8_865_000_000
SPARE_BYTES = 500_000_000  # what the runs write, and whoever else does


@contextmanager
def released_widths(model: Path | None, tape: Path | None, folder: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield (checkpoint, tape). What is None is made below `folder` and gone at the end, also after SIGTERM.

    Exits with a message when the disk has no room for it.
    """
    if model is not None and tape is not None:
        yield model, tape
        return
    needed = SPARE_BYTES + (MODEL_BYTES if model is None else 0) + (TAPE_BYTES if tape is None else 0)
    place = folder or Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    if free < needed:
        sys.exit(
            f"{place}: {free / 1e9:.1f} GB free, this benchmark needs {needed / 1e9:.1f} GB there: name another disk "
            "with --folder, or a checkpoint and its tape with --model and --tape"
        )
    signal.signal(signal.SIGTERM, _end)
    made = Path(tempfile.mkdtemp(prefix="released-widths-", dir=place))
    try:
        yield model or _make_model(made / "model"), tape or _make_tape(model or made / "model", made / "tape")
    finally:
        shutil.rmtree(made)


def _make_model(out: Path) -> Path:
    print(f"writing {MODEL_BYTES / 1e9:.1f} GB to {out}", file=sys.stderr)
    write_checkpoint(out, released_spec(LAYERS, EXPERTS), seed=0)
    return out


def _make_tape(model: Path, out: Path) -> Path:
    print(f"packing {model} to {out}", file=sys.stderr)
    index = open_index(model)
    with TensorReader(index) as reader:
        pack(bind(read_config(model), index), reader, out)
    return out


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
