"""What a lost actor had: a pure function of what it was last loaded with."""

from __future__ import annotations

from k3ray.cluster.actor_calls import ActorId
from k3ray.cluster.homes import Spec
from k3ray.cluster.relocation import LostPart
from k3ray.workers.expert_owners import ExpertOwners
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.specs import StageSpec


def lost_part(actor: ActorId, spec: Spec, config: ModelConfig, num_stages: int, remote: bool) -> LostPart:
    """Return what an actor has. remote: the experts are in shards."""
    if isinstance(spec, StageSpec):
        moe = sum(config.is_moe(layer) for layer in range(spec.first, spec.stop))
        owned = 0 if remote else moe * config.num_experts
        slots = owned if spec.cache_slots is None else spec.cache_slots
        pinned = None if spec.tape is None else spec.tape.pinned_chunks
        layers = frozenset(range(spec.first, spec.stop))
        top = spec.first == 0 or spec.stop == config.num_hidden_layers
        alone = num_stages == 1
        return LostPart(actor, spec.first, spec.stop, spec.threads, layers, top, owned, slots, pinned, remote, alone)
    owners = ExpertOwners(spec.num_shards, config.num_experts, spec.experts)
    held = owners.held_by(spec.shard, config.moe_layers, config.num_experts)
    owned = int(sum(mask.sum() for mask in held.values()))
    slots = owned if spec.cache_slots is None else spec.cache_slots
    return LostPart(actor, 0, 0, spec.threads, frozenset(held), False, owned, slots, None)
