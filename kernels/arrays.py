"""What a kernel asks of the arrays it is handed: dtype, shape, layout; and memory that starts on a cache line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

CACHE_LINE = 64


def require(
    name: str, array: NDArray[Any], dtypes: tuple[DTypeLike, ...], shape: tuple[int | None, ...], written: bool = False
) -> None:
    """Raise ValueError unless `array` is C-contiguous with one of the dtypes and the shape (None: any extent)."""
    wanted = " or ".join(str(np.dtype(dtype)) for dtype in dtypes)
    extents = ", ".join("any" if extent is None else str(extent) for extent in shape)
    fits = array.ndim == len(shape) and all(w is None or w == f for w, f in zip(shape, array.shape, strict=True))
    if not fits or array.dtype not in dtypes:
        raise ValueError(f"{name}: found {array.dtype} {array.shape}, expected {wanted} ({extents})")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: found strides {array.strides} for shape {array.shape}, expected C-contiguous memory")
    if written and not array.flags.writeable:
        raise ValueError(f"{name}: found read-only memory, expected memory of the caller's own to write to")


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Uninitialised memory of this shape that starts on a cache line."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return memory[skip : skip + size].view(dtype).reshape(shape)
