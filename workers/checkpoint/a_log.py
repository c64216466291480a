"""A_log, the one tensor whose values prove its layout: one value a KDA head, stored longer with zeros, or [1, 1, h, 1].

Docs: CHECKPOINT.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.tensors import TensorReader, TensorReadError, require_finite


def read_a_log(reader: TensorReader, name: str, heads: int) -> npt.NDArray[np.float32]:
    """A KDA layer's A_log, (heads,) f32, one value a HEAD.

    The release stores (head_dim,) with zeros after the heads; (heads,) and the older [1, 1, heads, 1] are the same.
    Raises TensorReadError when there are fewer, or when the tail is not zero: then it is not padding.
    """
    entry = reader.entry(name)
    if entry.dtype != "F32" or not is_a_log_shape(entry.shape, heads):
        expected = f"F32 [{heads}], or longer with zeros after it, or [1, 1, {heads}, 1]"
        raise TensorReadError(entry.path, name, f"{entry.dtype} {list(entry.shape)}", expected)
    values: npt.NDArray[np.float32] = reader.read(name).reshape(-1)
    tail = np.flatnonzero(values[heads:] != 0)
    if len(tail):
        place = heads + int(tail[0])
        found = f"{values[place]} at entry {place} ({len(tail)} entries after the {heads} heads are not zero)"
        raise TensorReadError(entry.path, name, found, "zeros there: otherwise these are not one value a head")
    return require_finite(entry, values[:heads].copy())


def is_a_log_shape(shape: tuple[int, ...], heads: int) -> bool:
    """Whether as many heads, or more than that, are stored in a way that is understood."""
    return shape == (1, 1, heads, 1) or (len(shape) == 1 and shape[0] >= heads)
