"""What a config must say for these formulas to be its model: released values, quantisation and the layer lists.

Docs: MODEL.md "Sizes". A field that selects another model is compared with the released value and refused by name.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from k3ray.workers.model.config_document import TEXT, ConfigDocument, same, show

MXFP4 = "mxfp4-pack-quantized"
MXFP4_GROUP = 32  # columns that share one scale byte

# (key, lies under linear_attn_config, released value)
RELEASED: tuple[tuple[str, bool, object], ...] = (
    ("hidden_act", False, "situ"),
    ("moe_router_activation_func", False, "sigmoid"),
    ("mla_use_nope", False, True),
    ("mla_use_output_gate", False, True),
    ("use_full_rank_gate", True, True),
    ("num_expert_group", False, 1),
    ("topk_group", False, 1),
    ("moe_layer_freq", False, 1),
    ("tie_word_embeddings", False, False),
    ("num_nextn_predict_layers", False, 0),
)
# Not in every converted file, but another value means another model.
RELEASED_IF_PRESENT: tuple[tuple[str, object], ...] = (
    ("topk_method", "noaux_tc"),
    ("attention_bias", False),
    ("pruned_heads", {}),
)
MODEL_TYPES = ("kimi_k3", "kimi_linear")  # of the released file and of the text model in it

QUANTISATION: tuple[tuple[str, object], ...] = (("quant_method", "compressed-tensors"), ("format", MXFP4))
WEIGHTS: tuple[tuple[str, object], ...] = (
    ("num_bits", 4),
    ("type", "float"),
    ("group_size", MXFP4_GROUP),
    ("strategy", "group"),
    ("symmetric", True),
)
WEIGHTS_IF_PRESENT: tuple[tuple[str, object], ...] = (
    ("actorder", None),
    ("block_structure", None),
    ("dynamic", False),
    ("scale_dtype", "torch.uint8"),
    ("zp_dtype", None),
)
TRANSFORMS = ("sparsity_config", "transform_config")  # ways of storing weights that are not MXFP4 alone


def check_released(document: ConfigDocument) -> None:
    """Note every field whose value selects another model than the released one."""
    for key, kda, released in RELEASED:
        expected = f"{json.dumps(released)} (the released model's; another value is another model)"
        value = document.value(key, kda, expected)
        if value is not None and not (type(value) is type(released) and value == released):
            document.note(document.field(key, kda), show(value), expected)
    for key, released in RELEASED_IF_PRESENT:
        value = document.value(key, required=False)
        if value is not None and not (type(value) is type(released) and value == released):
            document.note(document.field(key), show(value), f"{json.dumps(released)} (the released model's)")
    for place, text_model in (("model_type", False), (f"{TEXT}.model_type", True)):
        found = document.own_value("model_type", text_model)
        if found is not None and found not in MODEL_TYPES:
            document.note(place, show(found), f"one of {json.dumps(MODEL_TYPES)}, whose formulas these are")


def check_quantisation(document: ConfigDocument) -> None:
    """Note every way in which the experts are not MXFP4 in groups of 32 with one symmetric uint8 scale each."""
    key = "quantization_config"
    place = document.field(key)
    section = document.value(key, expected=f"an object with format {MXFP4}")
    if section is None:
        return
    if not isinstance(section, dict):
        document.note(place, show(section), f"an object with format {MXFP4}")
        return
    _require(document, place, section, QUANTISATION)
    _allow(document, place, section, (("kv_cache_scheme", None),))
    for key in TRANSFORMS:
        if section.get(key) not in (None, {}):
            document.note(f"{place}.{key}", show(section[key]), "nothing")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        found = "nothing" if groups is None else show(groups)
        document.note(f"{place}.config_groups", found, "an object with at least one group")
        return
    for name, group in groups.items():
        _check_group(document, f"{place}.config_groups.{json.dumps(name)[1:-1]}", group)


def _check_group(document: ConfigDocument, place: str, group: Any) -> None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        found = "nothing" if weights is None else show(weights)
        document.note(f"{place}.weights", found, "an object that describes MXFP4 weights")
        return
    _allow(document, place, group, (("format", MXFP4), ("input_activations", None), ("output_activations", None)))
    _require(document, f"{place}.weights", weights, WEIGHTS)
    _allow(document, f"{place}.weights", weights, WEIGHTS_IF_PRESENT)


def _require(
    document: ConfigDocument, place: str, section: dict[str, Any], values: tuple[tuple[str, object], ...]
) -> None:
    for key, _ in values:
        if key not in section:
            document.note(f"{place}.{key}", "nothing", json.dumps(dict(values)[key]))
    _allow(document, place, section, values)


def _allow(
    document: ConfigDocument, place: str, section: dict[str, Any], values: tuple[tuple[str, object], ...]
) -> None:
    for key, expected in values:
        if key in section and not (type(section[key]) is type(expected) and same(section[key], expected)):
            document.note(f"{place}.{key}", show(section[key]), json.dumps(expected))


def read_layer_lists(document: ConfigDocument, layers: int | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(MLA layers, KDA layers), zero-based, ascending, from the two ONE-based lists, which must be a partition.

    `layers` is num_hidden_layers, None when that field is itself a problem (then only the lists' types are checked).
    """
    full = document.wholes("full_attn_layers", kda=True)
    kda = document.wholes("kda_layers", kda=True)
    if full is None or kda is None or layers is None:
        return None
    both = f"{document.field('full_attn_layers', True)} and kda_layers"
    if 0 in full + kda and sorted(full + kda) == list(range(layers)):
        document.note(both, f"a zero-based list (0..{layers - 1})", f"the one-based list 1..{layers}")
        return None
    clean = True
    for key, values in (("full_attn_layers", full), ("kda_layers", kda)):
        outside = [value for value in values if not 1 <= value <= layers]
        repeated = sorted(value for value, count in Counter(values).items() if count > 1)
        if outside:
            document.note(document.field(key, True), show(outside), f"one-based layer numbers 1..{layers}")
        if repeated:
            document.note(document.field(key, True), f"{show(repeated)} more than once", "each layer once")
        clean = clean and not outside and not repeated
    shared = sorted(set(full) & set(kda))
    missing = sorted(set(range(1, layers + 1)) - set(full) - set(kda))
    if shared:
        document.note(both, f"layers {show(shared)} in both", "each layer in one of them")
    if missing:
        document.note(both, f"layers {show(missing)} in neither", f"every layer 1..{layers} in one of them")
    if not clean or shared or missing:
        return None
    return tuple(sorted(value - 1 for value in full)), tuple(sorted(value - 1 for value in kda))
