"""What a checkpoint holds, counted: the record behind `k3ray inspect`, and how it is made from a folder.

Knows nothing of printing. Works on a whole checkpoint and, by name only, on a config beside an index file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.binding import Binding, bind
from k3ray.workers.checkpoint.index import open_index, open_names
from k3ray.workers.checkpoint.index_table import TensorIndex
from k3ray.workers.checkpoint.leftovers import PROJECTOR, VISION, unused_line
from k3ray.workers.checkpoint.shard_files import list_shard_files
from k3ray.workers.model.config import ModelConfig, read_config, unknown_line

# object of the census -> short kinds that belong to it
_OBJECTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("A_log", (shapes.A_LOG,)),
    ("dt_bias", ("self_attn.dt_bias",)),
    ("router weight", ("block_sparse_moe.gate.weight",)),
    ("router correction bias", ("block_sparse_moe.gate.e_score_correction_bias",)),
    ("expert weight_packed", tuple(f"{shapes.EXPERTS}{matrix}.weight_packed" for matrix in shapes.EXPERT_MATRICES)),
    ("expert weight_scale", tuple(f"{shapes.EXPERTS}{matrix}.weight_scale" for matrix in shapes.EXPERT_MATRICES)),
    (
        "AttnRes projections",
        ("self_attention_res_proj.weight", "mlp_res_proj.weight", "output_attn_res_proj.weight"),
    ),
    ("AttnRes norms", ("self_attention_res_norm.weight", "mlp_res_norm.weight", "output_attn_res_norm.weight")),
)
ROUTED, SHARED, ATTENTION, DENSE, REST = "routed experts", "shared experts", "attention", "dense MLP", "other"
EMBEDDING, HEAD = "embedding", "head"
_GROUP_STARTS = (
    ("block_sparse_moe.shared_experts.", SHARED),
    ("self_attn.", ATTENTION),
    ("mlp.", DENSE),
    ("embed_tokens.", EMBEDDING),
    ("lm_head.", HEAD),
)


@dataclass(frozen=True, slots=True)
class Census:
    """Counts and bytes of one checkpoint.

    tensor_bytes and left_bytes are None, and shapes_checked False, when only names are known: then bytes_by_group is
    what the config's shapes make of the bound names. file_bytes is 0 where no size is known. objects: entries by the
    kinds of CHECKPOINT.md's table. trunk_bytes: the layers without routed experts. observations: for the reader.
    """

    directory: str
    prefix: str
    fingerprint: str
    index_file: str | None
    stated_bytes: int | None
    shapes_checked: bool
    num_shards: int
    file_bytes: int
    num_tensors: int
    tensor_bytes: int | None
    num_bound: int
    bound_bytes: int
    num_left: int
    left_bytes: int | None
    left: dict[str, int]
    objects: dict[str, int]
    bytes_by_group: dict[str, int]
    num_layers: int
    num_kda_layers: int
    num_mla_layers: int
    num_moe_layers: int
    num_experts: int
    expert_bytes: int
    trunk_bytes: int
    expert_bytes_per_token: int
    observations: tuple[str, ...]


def read_census(model_dir: Path) -> Census:
    """The census of a checkpoint folder, of its names alone when it holds an index but no shard.

    Raises ConfigError, BindError, or what open_index raises.
    """
    config = read_config(model_dir)
    files = list_shard_files(model_dir)
    names_only = not files.shards and files.index_path is not None
    index = open_names(model_dir) if names_only else open_index(model_dir)
    return take_census(config, index, bind(config, index), tuple(filter(None, (unknown_line(model_dir),))))


def take_census(
    config: ModelConfig, index: TensorIndex, binding: Binding, observations: tuple[str, ...] = ()
) -> Census:
    """Count a bound checkpoint. observations: what was noticed before, to be told with the others."""
    groups = _group_bytes(config, index, binding)
    bound_bytes = sum(groups.values())
    tensor_bytes = index.total_bytes() if index.has_shapes else None
    expert_bytes = sum(map(shapes.nbytes, shapes.expert_tensors(config).values()))
    objects = {name: sum(binding.bound.get(short, 0) for short in shorts) for name, shorts in _OBJECTS}
    objects |= {kind: binding.left.get(kind, 0) for kind in (VISION, PROJECTOR)}
    top = set(shapes.top_tensors(config))
    return Census(
        directory=str(index.directory),
        prefix=binding.prefix,
        fingerprint=index.fingerprint,
        index_file=index.index_file,
        stated_bytes=index.stated_bytes,
        shapes_checked=binding.shapes_checked,
        num_shards=len(index.shards),
        file_bytes=sum(shard.file_bytes for shard in index.shards),
        num_tensors=len(index),
        tensor_bytes=tensor_bytes,
        num_bound=binding.num_bound,
        bound_bytes=bound_bytes,
        num_left=binding.num_left,
        left_bytes=None if tensor_bytes is None else tensor_bytes - bound_bytes,
        left=binding.left,
        objects=objects,
        bytes_by_group=groups,
        num_layers=config.num_hidden_layers,
        num_kda_layers=len(config.kda_layers),
        num_mla_layers=len(config.mla_layers),
        num_moe_layers=len(config.moe_layers),
        num_experts=len(config.moe_layers) * config.num_experts,
        expert_bytes=expert_bytes,
        trunk_bytes=bound_bytes - groups[ROUTED] - sum(shapes.nbytes(shapes.top_tensors(config)[name]) for name in top),
        expert_bytes_per_token=len(config.moe_layers) * config.num_experts_per_token * expert_bytes,
        observations=(*_observations(config, index, binding, tensor_bytes), *observations),
    )


def _group_bytes(config: ModelConfig, index: TensorIndex, binding: Binding) -> dict[str, int]:
    """Bytes of the bound tensors by group; binding proved that every one has the shape of the table, A_log apart."""
    groups = dict.fromkeys((ROUTED, SHARED, ATTENTION, DENSE, EMBEDDING, HEAD, REST), 0)
    tables = [shapes.layer_tensors(config, layer) for layer in range(config.num_hidden_layers)]
    for table in (shapes.top_tensors(config), *tables):
        for short, tensor in table.items():
            group = next((group for start, group in _GROUP_STARTS if short.startswith(start)), REST)
            groups[group] += 0 if short == shapes.A_LOG else shapes.nbytes(tensor)
    for layer in config.kda_layers:
        entry = index.find(binding.layer_tensors(layer)[shapes.A_LOG]) if index.has_shapes else None
        groups[ATTENTION] += shapes.nbytes(tables[layer][shapes.A_LOG]) if entry is None else entry.nbytes
    expert = sum(map(shapes.nbytes, shapes.expert_tensors(config).values()))
    groups[ROUTED] = len(config.moe_layers) * config.num_experts * expert
    return groups


def _observations(
    config: ModelConfig, index: TensorIndex, binding: Binding, tensor_bytes: int | None
) -> tuple[str, ...]:
    """What agrees with no rule and breaks none."""
    found = []
    if not binding.shapes_checked:
        found.append("Only names were checked: the shards are not in this folder.")
    if index.has_shapes and config.kda_layers:
        entry = index.find(binding.layer_tensors(config.kda_layers[0])[shapes.A_LOG])
        if entry is not None and entry.shape != (config.kda_num_heads,):
            found.append(
                f"A_log is stored {list(entry.shape)} for {config.kda_num_heads} heads (the config gives heads, the "
                "code reads one value a head, the checkpoint pads): entries after the heads must be zero."
            )
    if unused := unused_line(binding.left):
        found.append(f"T{unused[1:]}.")
    if tensor_bytes is not None and index.stated_bytes not in (None, tensor_bytes):
        found.append(f"The index file states {index.stated_bytes} bytes of tensors, the shards hold {tensor_bytes}.")
    return tuple(found)
