"""The tensor anatomy's statements: counts, shapes, bytes and shares, closed between config, index and headers."""

from __future__ import annotations

from collections.abc import Sequence

from k3ray.amounts import decimal_size
from k3ray.audit.artifact import Artifact
from k3ray.audit.claims import compared, number, said, some
from k3ray.audit.counting import Rules
from k3ray.audit.rules import PROJECTOR, ROUTED, TEXT, VISION, Rule
from k3ray.audit.snapshot import KindRow, Letter, Statement
from k3ray.workers.checkpoint import shapes

# (id, what, ends of the templates that belong to it)
_OBJECTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("a_log", "A_log, one a KDA layer", (".self_attn.A_log",)),
    ("dt_bias", "dt_bias, one a KDA layer", (".self_attn.dt_bias",)),
    ("router_weight", "router weights, one a MoE layer", (".block_sparse_moe.gate.weight",)),
    ("router_bias", "router correction biases, one a MoE layer", (".e_score_correction_bias",)),
    ("expert_packed", "expert weight_packed, three an expert", (".weight_packed",)),
    ("expert_scale", "expert weight_scale, three an expert", (".weight_scale",)),
    ("attnres_proj", "AttnRes projections, two a layer and the output one", ("_res_proj.weight",)),
    ("attnres_norm", "AttnRes norms, two a layer and the output one", ("_res_norm.weight",)),
)
_BOTH = "names of the tensors against the rules of config.json"


def tensor_statements(artifact: Artifact, rules: Rules, rows: Sequence[KindRow]) -> list[Statement]:
    """Everything that is said about which tensors there are."""
    return [
        *_totals(artifact, rules, rows),
        *(_object(id, what, ends, rows) for id, what, ends in _OBJECTS),
        *(_elsewhere(where, rules, rows) for where in (VISION, PROJECTOR)),
        *_types(artifact, rows),
        *_sizes(artifact, rules, rows),
    ]


def _totals(artifact: Artifact, rules: Rules, rows: Sequence[KindRow]) -> list[Statement]:
    text = sum(rule.entries for rule in rules.text)
    total = len(artifact.index)
    beside = sum(row.entries for row in rows if row.where not in (TEXT, ROUTED))
    subject = "tensor entries: the text model's, and others"
    counted = f"{number(total)}: {number(total - beside)} and {number(beside)}"
    others = sum(rule.entries for rule in rules.vision) if beside and rules.vision else beside
    wanted = f"{number(text + others)}: {number(text)} and {number(others)}"
    bound = artifact.binding.num_bound if artifact.binding is not None else None
    lines = artifact.unbound.splitlines()[1 : 2 + 3]
    why = " ".join(line.strip() for line in lines)
    found = f"{number(bound)} tensors" if bound is not None else f"the text model cannot be bound: {why}"
    prefix = artifact.prefix
    letter: Letter = "O" if artifact.index.has_shapes else "D"  # by names alone their shapes are the rules'
    bound_what = "tensors that a run binds" + ("" if letter == "O" else ", by their names alone")
    return [
        compared("tensors.total", "tensors", "O", subject, counted, wanted, _BOTH, main=True),
        compared("tensors.bound", "tensors", letter, bound_what, found, f"{number(text)} tensors", _BOTH),
        said("tensors.prefix", "tensors", "O", "the text model's names begin with", prefix,
             "every name: two prefixes in one checkpoint end the audit"),
    ]  # fmt: skip


def _object(id: str, what: str, ends: tuple[str, ...], rows: Sequence[KindRow]) -> Statement:
    mine = [row for row in rows if row.where in (TEXT, ROUTED) and f".{row.kind}".endswith(ends)]
    found, expected = sum(row.entries for row in mine), sum(row.expected_entries or 0 for row in mine)
    return compared(f"tensors.{id}", "tensors", "O", what, number(found), number(expected), _BOTH)


def _elsewhere(where: str, rules: Rules, rows: Sequence[KindRow]) -> Statement:
    found = number(sum(row.entries for row in rows if row.where == where))
    expected = number(sum(rule.entries for rule in rules.vision if rule.where == where))
    subject = f"{where} tensors, left alone by the text model"
    if found == "0" or expected == "0":
        return said(f"tensors.{where}", "tensors", "O", subject, found, "names of the tensors")
    source = "names of the tensors against config.json vision_config"
    return compared(f"tensors.{where}", "tensors", "O", subject, found, expected, source)


def _types(artifact: Artifact, rows: Sequence[KindRow]) -> list[Statement]:
    if not artifact.index.has_shapes:
        subject = "dtypes and shapes as the shards' headers state them"
        found = "not read: the shards are not here; all shapes and bytes shown are derived from the rules"
        return [said("tensors.shapes", "tensors", "U", subject, found, "config and index only")]
    ruled = [row for row in rows if row.agrees is not None]
    wrong = [f"{row.kind} {row.dtype} {list(row.shape)}" for row in ruled if not row.agrees]
    found = f"{len(ruled) - len(wrong)} of {len(ruled)}" + (f"; not {some(wrong)}" if wrong else "")
    subject = "kinds with the dtype, shape and count of the rules"
    floats = sorted({row.kind.rsplit("#.", 1)[-1] for row in rows if row.dtype == "F32" and row.entries})
    expected = sorted({row.kind.rsplit("#.", 1)[-1] for row in rows if row.dtype == "F32" and row.expected_entries})
    source = "the headers against the rules of config.json"
    return [
        compared("tensors.shapes", "tensors", "O", subject, found, f"{len(ruled)} of {len(ruled)}", source),
        compared("tensors.f32", "tensors", "O", "kinds stored as F32", ", ".join(floats), ", ".join(expected), source),
    ]


def _sizes(artifact: Artifact, rules: Rules, rows: Sequence[KindRow]) -> list[Statement]:
    """Bytes: of one expert, of all, of what every token needs."""
    config = artifact.config
    letter: Letter = "O" if artifact.index.has_shapes else "D"
    source = "the headers against the rules" if letter == "O" else "the rules of config.json"
    experts = len(config.moe_layers) * config.num_experts
    expert = sum(rule.tensor_bytes for rule in rules.text if rule.where == ROUTED)
    routed = sum(row.bytes or 0 for row in rows if row.where == ROUTED)
    total = sum(row.bytes or 0 for row in rows)
    weights = 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
    trunk = [rule for rule in rules.text if rule.where == TEXT and rule.layers is not None]
    tops = [rule for rule in rules.text if rule.where == TEXT and rule.layers is None]
    active = sum(rule.elements * rule.entries for rule in (*trunk, *tops))
    trunk_bytes = sum(rule.tensor_bytes * rule.entries for rule in trunk)
    asked = len(config.moe_layers) * config.num_experts_per_token
    per_expert = f"{number(routed // experts if experts else 0)} bytes"
    rules_say = "the rules of config.json"
    return [
        _expert_bytes(artifact, per_expert, f"{number(expert)} bytes"),
        said("tensors.expert_weights", "tensors", "D", "weights of one routed expert",
             f"{number(weights)} weights x 0.53125 bytes", rules_say),
        compared("tensors.routed_bytes", "tensors", letter, f"bytes of all {number(experts)} routed experts",
                 number(routed), number(experts * expert), source),
        said("tensors.routed_share", "tensors", "D", "share of the routed experts in the tensors' bytes",
             f"{100 * routed / total:.2f} %: {number(routed)} of {number(total)}" if total else "no bytes", source),
        said("tensors.trunk_bytes", "tensors", "D", "bytes of the layers without routed experts, for every token",
             f"{number(trunk_bytes)} ({decimal_size(trunk_bytes)})", rules_say),
        said("tensors.embedding_bytes", "tensors", "D", "bytes of the embedding, and of the head",
             " and ".join(number(rule.tensor_bytes) for rule in _embedding(tops)), rules_say),
        said("tensors.active", "tensors", "D", "parameters outside the routed experts, A_log as stored",
             f"{number(active)} ({decimal_size(2 * active)} in bf16)", rules_say),
        said("tensors.per_token", "tensors", "D", "routed experts that a token asks for",
             f"{number(asked)}: {decimal_size(asked * expert)}", rules_say),
    ]  # fmt: skip


def _expert_bytes(artifact: Artifact, found: str, ruled: str) -> Statement:
    id, subject = "tensors.expert_bytes", "bytes of one routed expert"
    if not artifact.index.has_shapes:  # nothing to compare with: both would be the rules
        return said(id, "tensors", "D", subject, ruled, "the rules of config.json")
    return compared(id, "tensors", "O", subject, found, ruled, "the headers against the rules")


def _embedding(tops: Sequence[Rule]) -> list[Rule]:
    return [rule for rule in tops if rule.template.endswith(("embed_tokens.weight", shapes.LM_HEAD))]
