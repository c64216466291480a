"""A second opinion on the model: PyTorch, written from the formulas of docs/model.md alone, sharing no code with k3ray.

It reads config.json and the safetensors files by itself, decodes MXFP4 by table, keeps expanded keys and values for
MLA, runs KDA as the plain recurrence, and always sees a whole sequence at once: it has no state to carry. It is slow,
holds one layer at a time, and knows nothing of processes, tapes or caches.
"""

from __future__ import annotations

from torch_reference.model import ReferenceModel

__all__ = ["ReferenceModel"]
