"""What a checkpoint holds beside the text model, counted by kind, so that a report can say what was left alone."""

from __future__ import annotations

import numpy as np

from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.index_table import TensorIndex
from k3ray.workers.checkpoint.names import PLACE, numbers_of
from k3ray.workers.model.config import ModelConfig

VISION = "vision"
PROJECTOR = "projector"
LATER_LAYERS = "layers after the last"
UNUSED = "unused below the text prefix"
OTHER = "other"
_ELSEWHERE = (("vision_tower.", VISION), ("vision_model.", VISION), ("mm_projector.", PROJECTOR))


def count_left(config: ModelConfig, index: TensorIndex, prefix: str, bound: dict[str, int]) -> dict[str, int]:
    """Tensors that are not bound, by kind; kinds without a tensor are absent.

    What has only the text prefix in common with the model (an unknown tensor of a layer, an expert past the last) is
    counted as unused there.
    """
    left: dict[str, int] = {}
    inside = 0
    for template, count in index.templates().items():
        kind = _elsewhere(template, prefix)
        if kind is not None:
            left[kind] = left.get(kind, 0) + count
            continue
        later = 0
        if template.startswith(f"{prefix}layers.{PLACE}."):
            layers, _ = numbers_of(index.columns.keys[index.rows_of(template)])
            later = int(np.count_nonzero(layers >= config.num_hidden_layers))
        left[LATER_LAYERS] = left.get(LATER_LAYERS, 0) + later
        inside += count - later
    left[UNUSED] = inside - sum(bound.values())
    return {kind: count for kind, count in left.items() if count}


def unused_line(left: dict[str, int]) -> str:
    """What is said of tensors that look like the text model's and are not used; empty where there are none."""
    counts = ", ".join(f"{left[kind]:,} {kind}" for kind in (UNUSED, LATER_LAYERS, OTHER) if left.get(kind))
    return f"tensors left alone: {counts}: if the model needs them, this is not what it computes" if counts else ""


def _elsewhere(template: str, prefix: str) -> str | None:
    """The kind of a template outside the text model, None for one inside."""
    for start, kind in _ELSEWHERE:
        if template.startswith((start, prefix + start, f"model.{start}", f"language_model.{start}")):
            return kind
    if template.startswith(prefix) or template == shapes.top_name(prefix, shapes.LM_HEAD):
        return None
    return OTHER
