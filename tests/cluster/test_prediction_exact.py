"""What the planner foretells in bytes is what runs count: trunk, experts, every way of the messages, memory.

The runs are of a small model, in this process and on a Ray of its own; the comparison is the benchmark's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.decoded_run import PROMPT, WARM_UP, Decoded, decode, decoded
from benchmarks.prediction import differences, replayed
from benchmarks.prediction_setups import SetUp, planned
from k3ray.cluster.budget_plan import COPY, EXPERTS, PINNED, RING
from k3ray.cluster.cluster_file import described_speeds
from k3ray.cluster.message_sizes import add_ways, routed_ways, stage_ways
from k3ray.cluster.placed_plan import placed_plan
from k3ray.cluster.placement import ActorPlacement, Placement
from k3ray.cluster.roots_file import Roots, RootsMap
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.topology import NodeFacts
from k3ray.driver import Driver
from k3ray.nodes import look_here
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.expert_owners import ExpertOwners
from k3ray.workers.expert_reader import expert_slot_bytes
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.message_counts import MessageCounts
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.layout import plan_layout
from tests.tapes import SMALL_CHUNK, opened_model, synthetic_model

GEN = 12
Run = Callable[[SetUp], tuple[ModelConfig, LayerCosts, Placement, Decoded]]
SETUPS = (
    SetUp("one stage that streams", SyntheticSpec(), 1, 0, streamed=0.6),
    SetUp("one stage with half of the experts", SyntheticSpec(), 1, 0, held=0.5),
    SetUp("stages and shards that stream and read", SyntheticSpec(), 3, 2),
    SetUp("stages and three shards in memory", SyntheticSpec(), 3, 3),
)
TIGHT = SETUPS[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose layers have two digits, and its tape of many chunks."""
    folder = tmp_path_factory.mktemp("foretold")
    path = synthetic_model(folder / "model", SyntheticSpec(num_hidden_layers=12))
    with opened_model(path) as opened:
        opened.pack(folder / "tape", SMALL_CHUNK)
    return path, folder / "tape"


def facts(model: tuple[Path, Path]) -> NodeFacts:
    """This machine with speeds that nobody measured, and with cores enough."""
    path, tape = model
    node = look_here(RootsMap((), Roots((str(path),), (str(tape),))), None, 3, measure=False)
    return replace(node, speeds=described_speeds(10, 1), available_bytes=8 * 10**9, numa=())


def placed(setup: SetUp, model: tuple[Path, Path]) -> tuple[ModelConfig, LayerCosts, NodeFacts, Placement]:
    config = read_config(model[0])
    costs = LayerCosts(config, plan_layout(config, SMALL_CHUNK), PROMPT + WARM_UP + GEN + 1)
    node = facts(model)
    placement = planned(setup, config, costs, node)
    return config, costs, node, tight(placement, config, costs) if setup == TIGHT else placement


def tight(placement: Placement, config: ModelConfig, costs: LayerCosts) -> Placement:
    """With half of each stage's chunks in memory and the fewest slots: a seat of a machine has room for all of it."""

    def stage(one: ActorPlacement) -> ActorPlacement:
        run = one.first, one.stop
        pinned = len(costs.layout.chunks_of(*run, one.stop == config.num_hidden_layers)) // 2
        kept = {name: nbytes for name, nbytes in one.budget.parts.items() if name not in (PINNED, RING, COPY)}
        budget = replace(
            one.budget, pinned_chunks=pinned, ring_chunks=costs.ring_chunks(*run, pinned),
            streamed_bytes=costs.streamed_bytes(*run, pinned), parts=kept | costs.trunk_parts(*run, pinned),
        )  # fmt: skip
        return replace(one, budget=budget)

    def shard(one: ActorPlacement) -> ActorPlacement:
        slots = config.num_experts_per_token
        parts = {**one.budget.parts, EXPERTS: slots * expert_slot_bytes(config)}
        return replace(one, budget=replace(one.budget, cache_slots=slots, parts=parts))

    stages = tuple(stage(one) for one in placement.stages)
    prediction = replace(placement.prediction, trunk_bytes=sum(one.budget.streamed_bytes for one in stages))
    return replace(placement, stages=stages, shards=tuple(map(shard, placement.shards)), prediction=prediction)


@pytest.fixture(scope="module")
def runs(model: tuple[Path, Path]) -> Run:
    """run(setup): the set-up's plan, run in this process; each once."""

    @cache
    def run(setup: SetUp) -> tuple[ModelConfig, LayerCosts, Placement, Decoded]:
        config, costs, node, placement = placed(setup, model)
        spec = CheckpointSpec(model[0], None, config.num_hidden_layers, config=config)
        plan = placed_plan(placement, [node], spec, joined=False)
        chain = start_in_process(plan.stages, plan.shards)
        try:
            return config, costs, placement, decoded(Driver(chain), chain, config, GEN)
        finally:
            chain.close()

    return run


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_a_run_in_this_process_is_as_foretold(setup: SetUp, runs: Run, model: tuple[Path, Path]) -> None:
    config, costs, placement, run = runs(setup)
    asked = replayed(config, placement, model[0], run)
    assert differences(config, placement, costs, run, asked) == []
    assert bool(placement.prediction.trunk_bytes) == (setup.streamed is not None or setup == TIGHT)
    assert asked.requests == GEN * len(config.moe_layers) * config.num_experts_per_token
    assert (asked.hits == asked.requests) == (setup == SETUPS[3])
    assert len(placement.stages) == setup.seats and len(placement.shards) == setup.shards
    assert all(len(stage.budget.parts) > 3 for stage in placement.stages)


def test_what_is_not_as_foretold_is_said(runs: Run, model: tuple[Path, Path]) -> None:
    config, costs, placement, run = runs(TIGHT)
    asked = replayed(config, placement, model[0], run)

    def said(**more: object) -> list[str]:
        other = replace(run, counts=replace(run.counts, **more))  # type: ignore[arg-type]
        return [line.split(":")[0] for line in differences(config, placement, costs, other, asked)]

    counts, ways = run.counts, dict(run.counts.messages.way_bytes)
    assert said(trunk_bytes=counts.trunk_bytes + 1) == ["bytes of trunk"]
    assert said(expert_bytes=counts.expert_bytes - 4096) == ["bytes of experts"]
    assert said(requests=counts.requests + 1) == ["experts asked for"]
    assert said(hits=counts.hits + 1) == ["experts in memory"]
    for way in ways:
        messages = MessageCounts({**ways, way: ways[way] + 8}, counts.messages.positions)
        assert said(messages=messages) == ["bytes of messages"]
    bigger = replace(placement.stages[0].budget, pinned_chunks=placement.stages[0].budget.pinned_chunks - 1)
    changed = replace(placement, stages=(replace(placement.stages[0], budget=bigger), *placement.stages[1:]))
    lines = differences(config, changed, costs, run, asked)
    assert [line.split(":")[0] for line in lines] == [f"memory for the trunk of {placement.stages[0].budget.name}"]


def test_a_prompt_s_messages_are_as_foretold(model: tuple[Path, Path]) -> None:
    """Steps of many tokens, and with numbers of four digits: every way of a whole run."""
    config, _, node, placement = placed(TIGHT, model)
    spec = CheckpointSpec(model[0], None, config.num_hidden_layers, config=config)
    plan = placed_plan(placement, [node], spec, joined=False)
    chain = start_in_process(plan.stages, plan.shards)
    try:
        chain.record_routing()
        driver = Driver(chain, prompt_chunk=9)
        driver._next_step = 997
        session = driver.open(40)
        driver.forward({session: list(range(30))})
        found, routing = chain.counts().messages.way_bytes, chain.recorded_routing()
    finally:
        chain.close()
    layers = [(stage.first, stage.stop) for stage in placement.stages]
    expected: dict[str, int] = {}
    for step, (tokens, wanted) in enumerate(((9, 0), (9, 0), (9, 0), (3, 1)), 998):
        add_ways(expected, stage_ways(config, layers, tokens, wanted, step))
    owners = ExpertOwners(2, config.num_experts, placement.experts)
    add_ways(expected, routed_ways(config, layers, owners, 2, routing))
    names = [stage.budget.name for stage in placement.stages]
    following = dict(pairwise(names))
    ends = {way: way.split(" > ") for way in found}
    assert {
        f"{sender} > {following[sender] if receiver == 'next stage' else receiver}": found[way]
        for way, (sender, receiver) in ends.items()
    } == expected


@pytest.mark.ray
def test_a_run_on_ray_is_as_foretold(model: tuple[Path, Path]) -> None:
    config, costs, node, placement = placed(TIGHT, model)
    run = decode(placement, node, model[0], config, GEN)
    assert differences(config, placement, costs, run, replayed(config, placement, model[0], run)) == []
    assert run.counts.times.trips > 0 and placement.prediction.trunk_bytes > 0 and run.peaks
