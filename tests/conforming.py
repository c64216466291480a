"""What the tests of conform share: a small model of all kinds of layers, its reference, and one layer's report."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.conform.conformance import TOLERANCES, Conformance, LayerReport
from k3ray.conform.inputs import random_inputs
from k3ray.conform.own_side import OwnModel
from k3ray.conform.reference import Reference, default_reference, load_reference, open_reference
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec

# every kind of layer, a block that begins at an MLA layer, widths that are no multiple of 16, an eps that shows
ALL_KINDS = SyntheticSpec(
    num_hidden_layers=4, mla_layers=(2, 3), hidden_size=56, q_lora_rank=24, kv_lora_rank=20, rms_norm_eps=0.01
)
KDA_DENSE, KDA_MOE, MLA_MOE, LAST = range(4)
TOKENS = 9


def reference_of(path: Path, precision: str = "float64") -> Reference:
    return open_reference(None, path, path / "config.json", precision, 1)


def reports_of(
    own: OwnModel, reference: Reference, *layers: int, tokens: int = TOKENS, precision: str = "float64"
) -> list[LayerReport]:
    conformance = Conformance(own, reference, TOLERANCES[precision])
    inputs = partial(random_inputs, own.config, tokens=tokens, seed=3)
    return list(conformance.run(layers, inputs, []))


def failed_arrays(report: LayerReport) -> list[str]:
    return [found.name for found in report.failures]


def torch_part(name: str) -> Any:
    """A module of the reference, to put mistakes into."""
    load_reference(default_reference())
    return importlib.import_module(f"torch_reference.{name}")


def damaged_copy(model_dir: Path, folder: Path, name: str, change: Callable[[npt.NDArray[np.uint8]], None]) -> Path:
    """The checkpoint with one tensor's bytes changed in place."""
    copy = folder / "damaged"
    shutil.copytree(model_dir, copy)
    index = open_index(copy, [])
    entry = index.find(name)
    assert entry is not None
    contents = np.fromfile(entry.path, np.uint8)
    change(contents[entry.offset : entry.offset + entry.nbytes])
    contents.tofile(entry.path)
    return copy
