"""A whole audit snapshot in the released layout, made from rules alone, with every kind of statement in it."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from k3ray.audit.recorded import a_log_readers
from k3ray.audit.snapshot import (
    Author,
    KindRow,
    LayerRow,
    Load,
    Probe,
    ProbeRow,
    Recorded,
    Snapshot,
    Source,
    SourceFile,
    Statement,
    StatisticRow,
)
from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.synthetic_spec import encode_config, released_spec
from k3ray.workers.model.config import ModelConfig, read_config

PREFIX = shapes.RELEASED_PREFIX


def released_config() -> ModelConfig:
    """The released sizes, as the synthetic checkpoints know them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(encode_config(released_spec(93)))
        return read_config(path)


def released_sample() -> Snapshot:
    """A snapshot as an audit over HTTP of the released layout would look; its figures of weights are invented."""
    config = released_config()
    return Snapshot(
        made_at="2026-11-30T16:40:00Z",
        k3ray="0.1.0",
        source=_source(),
        statements=_statements(),
        layers=tuple(_layer(config, layer) for layer in range(config.num_hidden_layers)),
        kinds=_kinds(config),
        statistics=_statistics(),
        probe=_probe(),
        recorded=(
            Recorded("kimi-k3-in-c v1.0.0", "time per token, 8 GB", "124 cores, NVMe 4.6 GB/s", "26.5", "s/token", ""),
            Recorded("the model's repository", "bytes of shards", "published sizes", "1,560,936,091,448", "bytes", ""),
        ),
    )


def _source() -> Source:
    files = [SourceFile("config.json", 7006, "ab" * 32, 7006, 1, "whole file")]
    files += [
        SourceFile(
            f"model-{number:05d}-of-000096.safetensors",
            16_990_911_504,
            "cd" * 32,
            812_344,
            3,
            "fetched ranges",
            ((0, 812_344),),
        )
        for number in range(1, 97)
    ]
    return Source(
        "http",
        "https://huggingface.co/moonshotai/Kimi-K3/resolve/9f62e4e9fffbd0a83ddd60e1c209d828994b3569",
        "9f62e4e9fffbd0a83ddd60e1c209d828994b3569",
        1_560_936_091_448,
        sum(file.fetched_bytes for file in files),
        tuple(files),
        sum(file.ranges for file in files),
    )


def _statements() -> tuple[Statement, ...]:
    ours: Author = "k3ray"
    theirs: Author = "recorded by others"
    return (
        Statement("layers.attention", "layers", "D", ours, "layers by attention", "69 KDA, 24 MLA", "69 KDA, 24 MLA",
                  True, "config.json against the names of the index"),
        Statement("layers.moe", "layers", "D", ours, "layers with experts", "92", "92", True, "config.json"),
        Statement("tensors.total", "tensors", "O", ours, "tensor entries", "497,220", "497,220", True, "the headers"),
        Statement("tensors.bytes", "tensors", "O", ours, "bytes of tensors", "1,560,860,324,863", "1,560,860,324,864",
                  False, "the headers against the index"),
        Statement("a_log.shape", "parameters", "O", ours, "A_log: shape in the checkpoint against heads in the config",
                  "F32 [128] in 69 layers; entries 96 to 127 are zero in 1 of 1 layers read",
                  "one value a head: [96] (config num_heads 96; the code indexes per head)", None,
                  "headers, config.json, the rule of the code", True),
        *a_log_readers(),
        Statement("dt_bias.range", "parameters", "O", theirs, "dt_bias of layer 1", "-7.8938 to 0.1792", "", None,
                  "recorded on the released weights"),
        Statement("kda.chunked", "boundary", "X", ours, "chunked KDA against the recurrence: [16] H1", "3.1e-07",
                  "at most 1e-5", True, "executed on this machine"),
        Statement("router.probe", "parameters", "S", ours, "router under synthetic inputs", "load CV 0.41", "", None,
                  "2,048 seeded inputs"),
        Statement("a_log.why", "boundary", "U", ours, "why A_log is stored with 128 entries <b>&amp;</b>",
                  "nobody has established it", "", None, "", True),
    )  # fmt: skip


def _layer(config: ModelConfig, layer: int) -> LayerRow:
    tensors = list(shapes.layer_tensors(config, layer).values())
    tensors += list(shapes.expert_tensors(config).values()) * (config.num_experts * config.is_moe(layer))
    return LayerRow(
        layer,
        "MLA" if config.is_mla(layer) else "KDA",
        "MoE" if config.is_moe(layer) else "dense",
        layer // config.attn_res_block_size,
        len(tensors),
        sum(map(shapes.nbytes, tensors)),
        (f"model-{layer + 1:05d}-of-000096.safetensors",),
        "D",
    )


def _kinds(config: ModelConfig) -> tuple[KindRow, ...]:
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for layer in range(config.num_hidden_layers):
        for short, (dtype, shape) in shapes.layer_tensors(config, layer).items():
            counts[f"{PREFIX}layers.#.{short}", dtype, shape] += 1
    for short, (dtype, shape) in shapes.top_tensors(config).items():
        counts[shapes.top_name(PREFIX, short), dtype, shape] += 1
    for short, (dtype, shape) in shapes.expert_tensors(config).items():
        counts[f"{PREFIX}layers.#.{shapes.EXPERTS}#.{short}", dtype, shape] += 92 * 896
    rows = [
        KindRow(name, "routed experts" if ".experts." in name else "text", count, count, dtype, shape,
                count * shapes.nbytes((dtype, shape)), True, "", "O")
        for (name, dtype, shape), count in counts.items()
    ]  # fmt: skip
    rows.append(KindRow("vision_tower.encoder.blocks.#.wqkv.weight", "vision", 27, None, "BF16", (3072, 1024),
                        27 * 6_291_456, None, "left alone by the text model", "O"))  # fmt: skip
    rows.append(KindRow("mm_projector.proj.#.weight", "projector", 2, None, "", (), None, None, "shape unknown", "D"))
    return tuple(rows)


def _statistics() -> tuple[StatisticRow, ...]:
    return (
        StatisticRow("layer 1 KDA A_log", f"{PREFIX}layers.1.self_attn.A_log", 96, -0.15, -0.54, 0.07, -0.75, 2.47,
                     {"exp(A_log) median": 0.86, "exp(A_log) maximum": 11.8}, "O", "k3ray", "fetched from shard 2"),
        StatisticRow("layer 2 router row norms", f"{PREFIX}layers.2.block_sparse_moe.gate.weight", 896, 5.0364, None,
                     None, 2.6019, 7.0232, {"Pearson with the bias": 0.4567}, "U", "recorded by others",
                     "the model's documentation"),
    )  # fmt: skip


def _probe() -> Probe:
    rows = tuple(ProbeRow(layer, 896, 16, Load(0.41, 0.22, 0), Load(0.52, 0.28, 3), 0.81) for layer in (1, 2, 3))
    return Probe(20_261_130, 2048, 1.0, rows, chance_cv=0.164)
