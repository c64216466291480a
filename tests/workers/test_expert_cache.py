"""The expert cache: the same bits with any number of slots, one read an expert, and disks that fail."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3ray.driver import Driver
from k3ray.proof import trace
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.shapes import expert_tensors, nbytes
from k3ray.workers.expert_reader import ExpertUnreadable
from k3ray.workers.in_process import InProcessChain, start_in_process
from k3ray.workers.loading import CheckpointSpec, ShardSpec, StageSpec
from k3ray.workers.model.config import read_config

PROMPT = [84, 197, 179, 385, 423, 346, 143]
EXPERT_LAYER, EXPERT_PART = 5, "block_sparse_moe.experts"


def stage(model: Path, slots: int | None, mirrors: Sequence[Path] = ()) -> StageSpec:
    layers = read_config(model).num_hidden_layers
    return StageSpec(CheckpointSpec(model, None, layers, tuple(mirrors)), 0, layers, 1, (), cache_slots=slots)


def logits(chain: InProcessChain) -> bytes:
    return trace(Driver(chain), PROMPT, 4)[1].tobytes()


@pytest.fixture(scope="module")
def resident(k3b_dir: Path) -> bytes:
    return logits(start_in_process([stage(k3b_dir, None)], []))


@pytest.mark.parametrize("slots", [1, 2, 4, 7, 16, 50, 128, 1000])
def test_slots_change_no_bit_and_are_counted(k3b_dir: Path, resident: bytes, slots: int) -> None:
    chain = start_in_process([stage(k3b_dir, slots)], [])
    assert logits(chain) == resident
    counts = chain.counts()
    config = read_config(k3b_dir)
    expert = sum(map(nbytes, expert_tensors(config).values()))
    assert counts.requests > 0 and counts.hits <= counts.requests
    misses = counts.requests - counts.hits
    assert counts.expert_bytes >= misses * expert
    if slots >= len(config.moe_layers) * config.num_experts:
        assert misses <= len(config.moe_layers) * config.num_experts
    chain.close()


@pytest.mark.parametrize("slots", [1, 3, None])
def test_shards_with_few_slots(k3b_dir: Path, resident: bytes, slots: int | None) -> None:
    spec = stage(k3b_dir, None)
    shards = [ShardSpec(spec.checkpoint, shard, 3, 1, (), cache_slots=slots) for shard in range(3)]
    chain = start_in_process([spec], shards)
    assert logits(chain) == resident
    chain.close()


def test_a_prompt_chunk_reads_each_distinct_expert_once(k3b_dir: Path) -> None:
    chain = start_in_process([stage(k3b_dir, 16)], [])
    driver = Driver(chain)
    session = driver.open(64)
    driver.forward({session: PROMPT * 4})
    config = read_config(k3b_dir)
    assert chain.counts().requests <= len(config.moe_layers) * config.num_experts
    chain.close()


@pytest.fixture
def broken(k3b_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A copy whose experts of one layer fail to be read: always, or only so many times."""
    copy = tmp_path / "model"
    shutil.copytree(k3b_dir, copy, ignore=shutil.ignore_patterns("golden.*"))

    def damage(times: float = float("inf")) -> Path:
        entries = [
            open_index(copy).find(f"language_model.model.layers.{EXPERT_LAYER}.{EXPERT_PART}.{expert}.w1.weight_packed")
            for expert in range(16)
        ]
        places = [(entry.path, entry.offset, entry.nbytes) for entry in entries if entry is not None]
        left, lock, real = [times], threading.Lock(), os.preadv

        def preadv(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            end = offset + sum(len(buffer) for buffer in buffers)
            if (
                any(path == where and offset < at + size and at < end for where, at, size in places)
                and end - offset < 10**5
            ):
                with lock:
                    if left[0] > 0:
                        left[0] -= 1
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, buffers, offset, *flags)

        monkeypatch.setattr(os, "preadv", preadv)
        return copy

    return damage


def test_a_read_that_fails_once_is_tried_again(broken: Callable[..., Path], resident: bytes) -> None:
    chain = start_in_process([stage(broken(times=2), 16)], [])
    assert logits(chain) == resident
    chain.close()


def test_an_unreadable_expert_stops_the_step_and_is_named(broken: Callable[..., Path]) -> None:
    chain = start_in_process([stage(broken(), 16)], [])
    with pytest.raises(
        ExpertUnreadable, match=rf"layer {EXPERT_LAYER} expert \d+ could not be read in 3 tries"
    ) as found:
        logits(chain)
    assert found.value.exit_code == 4
    assert "EIO" in str(found.value) and "at byte" in str(found.value) and "model-0000" in str(found.value)
    chain.close()


def test_another_folder_gives_what_the_first_cannot(
    broken: Callable[..., Path], k3b_dir: Path, resident: bytes
) -> None:
    chain = start_in_process([stage(broken(), 16, mirrors=[k3b_dir])], [])
    assert logits(chain) == resident
    chain.close()


def test_after_a_failure_nothing_half_read_counts_as_resident(broken: Callable[..., Path], resident: bytes) -> None:
    chain = start_in_process([stage(broken(times=3 * 16), 128)], [])
    driver = Driver(chain)
    with pytest.raises(ExpertUnreadable):
        trace(driver, PROMPT, 4)
    for _ in range(20):  # the disk comes back after a while
        try:
            assert trace(driver, PROMPT, 4)[1].tobytes() == resident
            break
        except ExpertUnreadable:
            continue
    else:
        pytest.fail("the experts were never read again")
    chain.close()


def test_mirrors_travel_in_the_plan(k3b_dir: Path) -> None:
    spec = stage(k3b_dir, None, [k3b_dir])
    assert replace(spec.checkpoint, mirrors=()) != spec.checkpoint
