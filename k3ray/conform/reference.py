"""Finds the PyTorch reference, which is no part of the package, and what it must be able to do.

The reference stands in the source tree, so that k3ray itself never depends on torch and shares no code with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from k3ray.workers.failure import Failure

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.integer[Any]]
Choose = Callable[[Floats, Ids], Ids]

PACKAGE = "torch_reference"
PRECISIONS = ("float64", "float32")


class ReferenceFailure(Failure):
    """There is no reference to compare with, or it is not one."""

    exit_code = 2


class ReferenceRun(Protocol):
    """One layer's answer for a whole sequence; see scripts/torch_reference/model.py for the shapes."""

    @property
    def prefix(self) -> Floats:
        """(tokens, hidden): the prefix sum that leaves the layer."""
        ...

    @property
    def blocks(self) -> Floats:
        """(tokens, n, hidden): the blocks that leave the layer."""
        ...

    @property
    def stages(self) -> Mapping[str, Floats]:
        """Values on the way, in the names of Slice's observer, (tokens, width) each."""
        ...

    @property
    def state(self) -> Mapping[str, Floats]:
        """What the sequence leaves behind."""
        ...

    @property
    def expert_ids(self) -> Ids | None:
        """(tokens, k): the experts that were used."""
        ...

    @property
    def selection(self) -> Floats | None:
        """(tokens, experts): what selection compares."""
        ...


class Reference(Protocol):
    """A checkpoint as the reference computes it, always a whole sequence from its beginning."""

    def embed(self, ids: list[int]) -> Floats:
        """Return (ids, hidden)."""
        ...

    def run_layer(self, layer: int, prefix: Floats, blocks: Floats, choose: Choose) -> ReferenceRun:
        """Run a zero-based layer; choose turns selection scores and the ids they choose into the ids that are used."""
        ...

    def logits(self, prefix: Floats, blocks: Floats) -> Floats:
        """Return (tokens, vocab) for what leaves the last layer."""
        ...


def default_reference() -> Path:
    """The reference of the source tree that this package is run from."""
    return Path(__file__).resolve().parents[2] / "scripts" / PACKAGE


def open_reference(folder: Path | None, model_dir: Path, config: Path, precision: str, threads: int) -> Reference:
    """Load the reference from its folder (None: the source tree's) on a checkpoint; raises ReferenceFailure."""
    place = (folder or default_reference()).resolve()
    if not (place / "__init__.py").is_file():
        said = f"--reference {folder}" if folder else "the PyTorch reference is not part of the installed package"
        raise ReferenceFailure(
            f"{said}: found no {place / '__init__.py'}; fetch k3ray's source and name its folder: "
            f"--reference SOURCE/scripts/{PACKAGE}"
        )
    try:
        importlib.import_module("torch")
    except ImportError:
        raise ReferenceFailure(
            "conform compares with a PyTorch model, and torch is not installed: pip install 'k3ray[reference]' "
            "(any CPU build will do)"
        ) from None
    make: Callable[[Path, Path, str, int], Reference] = load_reference(place).ReferenceModel
    return make(model_dir, config, precision, threads)


def load_reference(place: Path) -> Any:
    """Import the folder as the package torch_reference, whatever it is called and wherever it lies.

    Raises ReferenceFailure for a folder that is no reference, or another one than was loaded before.
    """
    init = place / "__init__.py"
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None:
        if loaded.__file__ != str(init):
            raise ReferenceFailure(f"--reference {place}: this process has loaded {loaded.__file__} already")
        return loaded
    spec = importlib.util.spec_from_file_location(PACKAGE, init, submodule_search_locations=[str(place)])
    assert spec is not None and spec.loader is not None  # the file is there and is Python
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    try:
        spec.loader.exec_module(module)
        module.ReferenceModel  # noqa: B018 - must be there
    except BaseException as error:
        del sys.modules[PACKAGE]
        if isinstance(error, Exception):
            raise ReferenceFailure(f"--reference {place}: found a folder that fails with {error!r}, expected "
                                   f"k3ray's scripts/{PACKAGE}") from error  # fmt: skip
        raise
    return module
