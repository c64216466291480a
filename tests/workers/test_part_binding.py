"""Parts of a checkpoint in several folders: what a process needs is bound, and what is in none of them is named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3ray.driver import Driver
from k3ray.proof import logits_hash, trace
from k3ray.workers.checkpoint.binding import BindError
from k3ray.workers.checkpoint.index import CheckpointError, open_index, open_part
from k3ray.workers.checkpoint.index_build import DuplicateTensor
from k3ray.workers.checkpoint.part_binding import ModelPart, bind_part, whole_experts
from k3ray.workers.expert_owners import ExpertGroup
from k3ray.workers.in_process import start_in_process
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.specs import CheckpointSpec, ShardSpec, StageSpec
from tests.parts import TOP, cut_by_layers, part_of

PROMPT = [84, 197, 179, 385, 423]


@pytest.fixture(scope="module")
def whole(k3b_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_by_layers(k3b_dir, tmp_path_factory.mktemp("cut") / "whole")


@pytest.fixture(scope="module")
def folders(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A beginning, a middle and an end; the middle overlaps with the others."""
    base = tmp_path_factory.mktemp("parts")
    parts: dict[str, Iterable[int | str]] = {"a": [TOP, 0, 1, 2, 3], "b": [3, 4, 5, 6], "c": [TOP, 6, 7, 8]}
    return {name: part_of(whole, base / name, held) for name, held in parts.items()}


def masks(config: ModelConfig, layers: Iterable[int]) -> dict[int, np.ndarray]:
    return {layer: np.ones(config.num_experts, dtype=bool) for layer in layers}


def test_a_part_is_indexed_as_a_part_only(folders: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    for cache in ([], [tmp_path / "cache"], [tmp_path / "cache"]):
        assert len(open_part(folders["a"], cache)) < len(open_index(whole, cache))
        with pytest.raises(CheckpointError, match="5 of its 10 shards; missing: model-00004"):
            open_index(folders["a"], cache)
    assert open_part(whole, []).fingerprint == open_index(whole, []).fingerprint


def test_a_shard_that_is_not_what_the_index_file_says(folders: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    wrong = part_of(whole, tmp_path / "wrong", [3])
    (wrong / "model-00004.safetensors").write_bytes((whole / "model-00003.safetensors").read_bytes())
    with pytest.raises(DuplicateTensor, match="expected in one shard"):
        open_part(wrong, [])


def test_what_is_needed_is_bound_and_nothing_else(folders: dict[str, Path]) -> None:
    config = read_config(folders["a"])
    a, b = open_part(folders["a"], []), open_part(folders["b"], [])
    part = ModelPart(range(6), embedding=True, experts=masks(config, range(1, 6)))
    binding = bind_part(config, [a, b], part)
    assert binding.bound["block_sparse_moe.experts.w1.weight_packed"] >= 5 * config.num_experts
    assert binding.bound["embed_tokens.weight"] == 1 and "lm_head.weight" not in binding.bound
    assert whole_experts(config, b, binding.prefix).sum(axis=1).tolist() == [0, 0, 0, 16, 16, 16, 16, 0, 0]
    with pytest.raises(BindError, match="layer 7 expert 0: whole in none of the folders"):
        bind_part(config, [a, b], ModelPart(experts=masks(config, [6, 7])))
    with pytest.raises(BindError, match=r'layers\.7\.input_layernorm\.weight": in none of the folders'):
        bind_part(config, [b], ModelPart(range(6, 8)))
    with pytest.raises(BindError, match=r'lm_head\.weight": in none'):
        bind_part(config, [b], ModelPart(head=True))


def test_a_wrong_shape_in_any_folder_is_refused(folders: dict[str, Path]) -> None:
    config = read_config(folders["a"])
    other = replace(config, moe_intermediate_size=config.moe_intermediate_size // 2)
    with pytest.raises(BindError, match="expected U8"):
        bind_part(other, [open_part(folders["b"], [])], ModelPart(experts=masks(config, [4])))


def test_the_bits_do_not_depend_on_who_has_what(whole: Path, folders: dict[str, Path]) -> None:
    """Unequal stages and shards, each with its own folders, against one process with the whole."""
    config = read_config(whole)
    one = start_in_process([StageSpec(CheckpointSpec(whole, None, 9), 0, 9, 1, ())], [])
    expected = logits_hash(trace(Driver(one), PROMPT, 3)[1])
    one.close()

    def at(*names: str) -> CheckpointSpec:
        first, *others = (folders[name] for name in names)
        return CheckpointSpec(first, None, 9, tuple(others), partial=True, config=config)

    low = ExpertGroup((1, 2, 3), (37, 11, 0))
    middle, high = ExpertGroup((4, 5, 6), (1, 47, 0)), ExpertGroup((7, 8), (0, 0, 32))
    shards = [
        ShardSpec(at(*names), number, 3, 1, (), 3, experts=(low, middle, high))
        for number, names in enumerate((("b", "a"), ("a", "b"), ("c",)))
    ]
    cuts = [(0, 4, ("a",)), (4, 6, ("b",)), (6, 9, ("c",))]
    stages = [
        StageSpec(at(*names), first, stop, 1, (), experts=(low, middle, high)) for first, stop, names in cuts
    ]  # fmt: skip
    chain = start_in_process(stages, shards)
    assert logits_hash(trace(Driver(chain), PROMPT, 3)[1]) == expected
    chain.close()
    with pytest.raises(BindError, match="layer 7 expert"):
        start_in_process([], [ShardSpec(at("b"), 2, 3, 1, (), 3, experts=(low, middle, high))])
