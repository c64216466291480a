"""The audit of the real released config and index reproduces every published count, and says what it did not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3ray.audit.making import AuditOptions, make_audit
from k3ray.audit.page import render
from k3ray.audit.snapshot import Snapshot, Statement
from k3ray.audit.snapshot_file import decode_snapshot, encode_snapshot
from k3ray.audit.source_files import DirectoryFiles

PREFIX = "language_model.model."
# The published shapes (docs/checkpoint.md): by the name's end, dtype, shape, entries.
SHAPES = {
    ("self_attn.q_proj.weight", "BF16", (12288, 7168)): 69,
    ("self_attn.q_conv1d.weight", "F32", (12288, 1, 4)): 69,
    ("self_attn.f_a_proj.weight", "BF16", (128, 7168)): 69,
    ("self_attn.f_b_proj.weight", "BF16", (12288, 128)): 69,
    ("self_attn.A_log", "F32", (128,)): 69,
    ("self_attn.dt_bias", "F32", (12288,)): 69,
    ("self_attn.o_norm.weight", "F32", (128,)): 69,
    ("self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, 7168)): 24,
    ("self_attn.kv_b_proj.weight", "BF16", (24576, 512)): 24,
    ("self_attn.g_proj.weight", "BF16", (12288, 7168)): 93,
    ("self_attn.o_proj.weight", "BF16", (7168, 12288)): 93,
    ("mlp.down_proj.weight", "BF16", (7168, 33792)): 1,
    ("block_sparse_moe.gate.weight", "BF16", (896, 7168)): 92,
    ("block_sparse_moe.gate.e_score_correction_bias", "F32", (896,)): 92,
    ("block_sparse_moe.experts.#.w1.weight_packed", "U8", (3072, 1792)): 82_432,
    ("block_sparse_moe.experts.#.w2.weight_packed", "U8", (3584, 1536)): 82_432,
    ("block_sparse_moe.experts.#.w3.weight_scale", "U8", (3072, 112)): 82_432,
    ("block_sparse_moe.shared_experts.down_proj.weight", "BF16", (7168, 6144)): 92,
}
# Every count of the published table, and the sizes: statement -> what it has to say.
FOUND = {
    "layers.count": "93: 0-92",
    "tensors.total": "497,220: 497,052 and 168",
    "tensors.bound": "497,052 tensors",
    "tensors.prefix": PREFIX,
    "tensors.a_log": "69",
    "tensors.dt_bias": "69",
    "tensors.router_weight": "92",
    "tensors.router_bias": "92",
    "tensors.expert_packed": "247,296",
    "tensors.expert_scale": "247,296",
    "tensors.attnres_proj": "187",
    "tensors.attnres_norm": "187",
    "tensors.vision": "165",
    "tensors.projector": "3",
    "tensors.expert_bytes": "17,547,264 bytes",
    "tensors.expert_weights": "33,030,144 weights x 0.53125 bytes",
    "tensors.routed_bytes": "1,446,456,066,048",
    "tensors.routed_share": "92.67 %: 1,446,456,066,048 of 1,560,860,324,864",
    "tensors.trunk_bytes": "108,811,877,376 (108.812 GB)",
    "tensors.embedding_bytes": "2,348,810,240 and 2,348,810,240",
    "tensors.active": "56,743,648,000 (113.487 GB in bf16)",
    "tensors.per_token": "1,472: 25.830 GB",
    "files.tensor_bytes": "1,560,860,324,864",
    "files.bytes": "1,560,936,091,448 in 96 shards",
    "files.header_bytes": "75,766,584",
    "layers.other_shards": (
        "model-00094-of-000096.safetensors: lm_head, model.embed_tokens, model.norm, model.output_attn_res_norm, "
        "model.output_attn_res_proj; model-00095-of-000096.safetensors: mm_projector.post_norm, mm_projector.proj; "
        "model-00096-of-000096.safetensors: vision_tower.encoder, vision_tower.patch_embed"
    ),
    "layers.attnres": "8 blocks of 12 layers (the last of 9); the bank grows to 8 rows",
    "layers.shards": "93 of 93 lie in one shard each; 93 of them in the shard numbered layer + 1",
}


@pytest.fixture(scope="module")
def audit(shared_data: Path) -> Snapshot:
    return make_audit(DirectoryFiles(shared_data / "k3-release"), AuditOptions())


def statement(snapshot: Snapshot, id: str) -> Statement:
    return next(statement for statement in snapshot.statements if statement.id == id)


@pytest.mark.parametrize("id", FOUND)
def test_published_figures_are_reproduced(audit: Snapshot, id: str) -> None:
    assert statement(audit, id).found == FOUND[id]


def test_nothing_disagrees_and_ids_are_unique(audit: Snapshot) -> None:
    assert audit.disagreements == ()
    assert len({statement.id for statement in audit.statements}) == len(audit.statements)
    agreeing = {statement.id for statement in audit.statements if statement.agrees}
    assert agreeing >= {f"tensors.{name}" for name in ("total", "a_log", "expert_packed", "vision", "routed_bytes")}


def test_attention_and_experts_lie_where_the_config_says(audit: Snapshot) -> None:
    mla = [*range(3, 92, 4), 92]
    assert [row.layer for row in audit.layers if row.attention == "MLA"] == sorted({*mla, 91})
    assert [row.layer for row in audit.layers if row.feed_forward == "dense"] == [0]
    assert [row.attnres_block for row in audit.layers] == [layer // 12 for layer in range(93)]
    assert statement(audit, "layers.attention").agrees
    assert all(row.shards == (f"model-{row.layer + 1:05d}-of-000096.safetensors",) for row in audit.layers)


def test_every_layer_leaves_its_shard_room_for_its_header_only(audit: Snapshot, shared_data: Path) -> None:
    """The published sizes are not ours: bytes by our rules plus a header of plausible length give them."""
    lines = (shared_data / "k3-release" / "shard_sizes.txt").read_text().splitlines()
    sizes = {name: int(size) for name, size in (line.split() for line in lines)}
    for row in audit.layers:
        assert row.bytes is not None
        header = sizes[row.shards[0]] - row.bytes
        assert 8 + 80 * row.tensors < header < 8 + 200 * row.tensors
    assert statement(audit, "files.header_room").agrees


@pytest.mark.parametrize("ending", SHAPES)
def test_kinds_have_the_published_shapes(audit: Snapshot, ending: tuple[str, str, tuple[int, ...]]) -> None:
    name, dtype, shape = ending
    rows = [row for row in audit.kinds if row.kind == f"{PREFIX}layers.#.{name}"]
    assert [(row.dtype, row.shape, row.entries, row.letter) for row in rows] == [(dtype, shape, SHAPES[ending], "D")]


def test_kinds_add_up(audit: Snapshot) -> None:
    assert sum(row.entries for row in audit.kinds) == 497_220
    assert sum(row.bytes or 0 for row in audit.kinds) == 1_560_860_324_864
    assert sum(row.entries for row in audit.kinds if row.where == "vision") == 165


def test_counts_are_observed_and_shapes_derived(audit: Snapshot) -> None:
    assert statement(audit, "tensors.a_log").kind == "O"
    assert statement(audit, "tensors.shapes").kind == "U"
    assert {row.letter for row in audit.kinds} == {row.letter for row in audit.layers} == {"D"}
    shape = statement(audit, "a_log.shape")
    assert shape.main
    assert (shape.kind, shape.agrees) == ("D", None)
    assert "[128]" in shape.found
    assert "[96]" in shape.expected
    assert statement(audit, "a_log.tail").kind == "U"
    # 69 layers x 32 entries x 4 bytes: the published total itself says that 128 are stored
    assert "with [96], 8,832 bytes fewer" in statement(audit, "a_log.bytes").found
    assert audit.probe is None
    assert {row.by for row in audit.statistics} == {"recorded by others"}


def test_source_and_round_trip(audit: Snapshot) -> None:
    source = audit.source
    assert (source.kind, source.total_bytes) == ("config and index only", 1_560_936_091_448)
    assert [file.name for file in source.files] == ["config.json", "model.safetensors.index.json.gz", "shard_sizes.txt"]
    assert source.fetched_bytes == sum(file.bytes or 0 for file in source.files)
    assert decode_snapshot(encode_snapshot(audit), "audit") == audit
    assert "497,220" in render(audit)
