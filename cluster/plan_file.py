"""plan.json: a placement written down and read back strictly, for the model that it was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from k3ray.cluster.placement import ActorPlacement, Placement
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.manifest import config_fields

FORMAT, FORMAT_VERSION = "k3ray cluster plan", 3
MAX_PLAN_BYTES = 1 << 26


class PlanFileFailure(Failure):
    """A plan that cannot be read, was changed by hand into nonsense, or is of another model."""

    exit_code = 2

    def __init__(self, path: Path, found: str, expected: str) -> None:
        self.path = path
        super().__init__(f"{path}: found {found}, expected {expected}; make it again with `k3ray plan --out`")


@dataclass(frozen=True, slots=True)
class _Document:
    format: str
    version: int
    model: str  # digest of the config's fields
    placement: Placement


def config_digest(config: ModelConfig) -> str:
    """What tells one architecture from another: every size and switch of the config."""
    return hashlib.blake2b(msgspec.json.encode(sorted(config_fields(config).items())), digest_size=16).hexdigest()


def plan_record(config: ModelConfig, placement: Placement) -> dict[str, Any]:
    """The document as plain values."""
    return asdict(_Document(FORMAT, FORMAT_VERSION, config_digest(config), placement))


def write_plan(path: Path, config: ModelConfig, placement: Placement) -> None:
    """Write beside and rename; raises PlanFileFailure where the folder does not take it."""
    text = msgspec.json.format(msgspec.json.encode(plan_record(config, placement)), indent=1) + b"\n"
    beside = path.with_name(f".{path.name}.writing")
    try:
        beside.write_bytes(text)
        beside.replace(path)
    except OSError as error:
        raise PlanFileFailure(path, f"no file that can be written ({error.strerror})", "a folder of yours") from None


def read_plan(path: Path, config: ModelConfig) -> Placement:
    """The placement in the file: every field known and typed, every layer and expert in it once, and of this model.

    Raises PlanFileFailure.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PLAN_BYTES)
    except OSError as error:
        raise PlanFileFailure(path, f"no file that can be read ({error.strerror})", "what `k3ray plan` wrote") from None
    try:
        raw = msgspec.json.decode(text)
        if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (FORMAT, FORMAT_VERSION):
            raise PlanFileFailure(path, "another kind of file or version", f"{FORMAT!r}, version {FORMAT_VERSION}")
        document = msgspec.convert(raw, type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PlanFileFailure(path, f"no plan ({error})", "every field, each of its type") from None
    if msgspec.json.decode(msgspec.json.encode(asdict(document))) != raw:
        raise PlanFileFailure(path, "a field that is not known", "the fields that this version writes")
    if document.model != config_digest(config):
        raise PlanFileFailure(path, "the plan of another model", "a plan that was made for this one")
    problem = next(iter(_problems(document.placement, config)), None)
    if problem is not None:
        raise PlanFileFailure(path, *problem)
    return document.placement


def _problems(plan: Placement, config: ModelConfig) -> list[tuple[str, str]]:
    """(what was found, what was expected) of every rule that the plan breaks."""
    found = []
    runs = [layer for stage in plan.stages for layer in range(stage.first, min(stage.stop, config.num_hidden_layers))]
    if runs != list(range(config.num_hidden_layers)) or any(stage.first >= stage.stop for stage in plan.stages):
        listed = ", ".join(f"{stage.first}..{stage.stop - 1}" for stage in plan.stages)
        found.append((f"stages with the layers {listed}", f"0..{config.num_hidden_layers - 1}, each once, in order"))
    if (plan.num_layers, plan.num_experts) != (config.num_hidden_layers, config.num_experts):
        found.append((f"num_layers {plan.num_layers}, num_experts {plan.num_experts}", "those of the model"))
    found += _expert_problems(plan, config) + _actor_problems(plan, (*plan.stages, *plan.shards))
    for number, node in enumerate(plan.nodes):
        if plan.node_bytes(number) > node.budget_bytes:
            found.append((f"{plan.node_bytes(number):,} bytes on node {node.name}", f"at most {node.budget_bytes:,}"))
    return found


def _expert_problems(plan: Placement, config: ModelConfig) -> list[tuple[str, str]]:
    found = []
    dealt = sorted(layer for group in plan.experts for layer in group.layers)
    if dealt != (list(config.moe_layers) if plan.shards else []):
        found.append(
            (f"experts of {len(dealt)} layers dealt out", "those of every MoE layer once, if there are shards")
        )
    for group in plan.experts:
        whole = len(group.layers) * config.num_experts
        if len(group.counts) != len(plan.shards) or min(group.counts, default=0) < 0 or sum(group.counts) != whole:
            found.append((f"{sum(group.counts)} experts over {len(group.counts)} shards", f"{whole} over all shards"))
    for number, shard in enumerate(plan.shards):
        owned = sum(group.counts[number] for group in plan.experts if number < len(group.counts))
        if shard.budget.owned_experts != owned:
            found.append((f"shard {number} with {shard.budget.owned_experts} experts", f"{owned}, as they are dealt"))
    return found


def _actor_problems(plan: Placement, actors: Sequence[ActorPlacement]) -> list[tuple[str, str]]:
    found = []
    for actor in actors:
        budget = actor.budget
        numbers = (actor.node, actor.threads - 1, budget.pinned_chunks, budget.ring_chunks, budget.streamed_bytes,
                   budget.cache_slots, *actor.cores, *budget.parts.values())  # fmt: skip
        if min(numbers) < 0 or actor.node >= len(plan.nodes) or budget.cache_slots > budget.owned_experts:
            found.append(
                (f"numbers of the actor {budget.name!r} that cannot be", "a node of the plan, nothing negative")
            )
    return found
