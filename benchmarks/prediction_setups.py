"""The set-ups of benchmarks/prediction.py: synthetic checkpoints, and what is asked of the planner for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from k3ray.cluster.placement import Placement, place
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import ClusterWishes, PlacementFailure
from k3ray.cluster.topology import NodeFacts
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.pack import pack

MB = 10**6

# 2048 wide, 1.7 GB: 0.8 GB of trunk and 448 experts of 1.7 MB, 16 of which a layer asks
NARROW = SyntheticSpec(
    num_hidden_layers=8, hidden_size=2048, vocab_size=32_768, intermediate_size=8192, attn_res_block_size=4,
    kda_num_heads=16, kda_head_dim=128, num_attention_heads=16, q_lora_rank=768, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=64, num_experts_per_token=16,
    routed_expert_hidden_size=1024, moe_intermediate_size=1024,
)  # fmt: skip
# 7168 wide as the release, 3.0 GB: 2.5 GB of trunk and 96 experts of 5.8 MB, 8 of which a layer asks
WIDE = SyntheticSpec(
    num_hidden_layers=4, hidden_size=7168, vocab_size=32_768, intermediate_size=16_384, attn_res_block_size=2,
    kda_num_heads=32, kda_head_dim=128, num_attention_heads=32, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=32, num_experts_per_token=8,
    routed_expert_hidden_size=3584, moe_intermediate_size=1024,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SetUp:
    """One run. streamed: the share of the trunk that a token is to read; held: of the experts that have slots, where
    the trunk is in memory; None: everything in memory.
    """

    name: str
    spec: SyntheticSpec
    seats: int
    shards: int
    streamed: float | None = None
    held: float | None = None


SETUPS = (
    SetUp("1 stage, all in memory", NARROW, 1, 0),
    SetUp("1 stage, 3/4 of the trunk streamed", WIDE, 1, 0, streamed=0.75),
    SetUp("1 stage, 1/2 of the experts held", NARROW, 1, 0, held=0.5),
    SetUp("2 stages, 2 shards, all in memory", NARROW, 2, 2),
    SetUp("2 stages, 2 shards, 1/3 streamed, few slots", NARROW, 2, 2, streamed=0.33),
)
SMOKE_SPEC = replace(
    NARROW, num_hidden_layers=4, hidden_size=512, vocab_size=2048, intermediate_size=1024, kda_num_heads=4,
    num_attention_heads=4, q_lora_rank=256, kv_lora_rank=128, routed_expert_hidden_size=256, moe_intermediate_size=256,
    num_experts=32, num_experts_per_token=8,
)  # fmt: skip


def made(folder: Path, spec: SyntheticSpec, chunk_bytes: int) -> tuple[Path, Path]:
    """(checkpoint, tape) below the folder, made unless they are there."""
    model, tape = folder / f"model-{spec.hidden_size}", folder / f"model-{spec.hidden_size}.tape"
    if not model.exists():
        write_checkpoint(model, spec, seed=0)
        index = open_index(model, [])
        with TensorReader(index) as reader:
            pack(bind(read_config(model), index), reader, tape, chunk_bytes)
    return model, tape


def planned(setup: SetUp, config: ModelConfig, costs: LayerCosts, node: NodeFacts) -> Placement:
    """The plan of a set-up, with the memory that makes it so."""
    wishes = ClusterWishes(seats=setup.seats, stages=setup.seats, shards=setup.shards, positions=costs.positions)

    def with_memory(nbytes: int) -> Placement:
        return place(config, costs.layout, [node], replace(wishes, memory_bytes=nbytes), costs)

    if setup.streamed is not None:
        most = setup.streamed * costs.trunk_bytes(0, config.num_hidden_layers)
        return _least(with_memory, node, lambda found: found.prediction.trunk_bytes <= most)
    if setup.held is not None:
        share = setup.held
        return _least(with_memory, node, lambda found: not found.prediction.trunk_bytes and _held(found) >= share)
    return _least(with_memory, node, lambda found: not found.prediction.trunk_bytes and _held(found) == 1)


def _held(placement: Placement) -> float:
    owners = placement.shards or placement.stages
    return sum(one.budget.cache_slots for one in owners) / sum(one.budget.owned_experts for one in owners)


def _least(plan: Callable[[int], Placement], node: NodeFacts, enough: Callable[[Placement], bool]) -> Placement:
    """The plan with the least memory that is enough, to a megabyte."""
    low, high = 0, node.available_bytes
    while high - low > MB:
        middle = (low + high) // 2
        try:
            fits = enough(plan(middle))
        except PlacementFailure:
            fits = False
        low, high = (low, middle) if fits else (middle, high)
    found = plan(high)
    if not enough(found):
        raise SystemExit(f"{node.available_bytes / 1e9:.1f} GB are too few for this set-up")
    return found
