"""What the synthetic writer refuses, what it leaves behind then, and what it needs of the machine."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3ray.workers.checkpoint import synthetic
from k3ray.workers.checkpoint.synthetic import SyntheticError, write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec, encode_config
from k3ray.workers.model.config import ConfigError, ModelConfig, read_config

SMALL = SyntheticSpec()


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_memory_is_bounded_and_progress_is_told(tmp_path: Path) -> None:
    spec = replace(SMALL, num_hidden_layers=1, intermediate_size=65_536, hidden_size=256)
    told: list[tuple[int, int]] = []
    tracemalloc.start()
    try:
        summary = write_checkpoint(
            tmp_path / "m", spec, seed=1, progress=lambda done, total: told.append((done, total))
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summary.tensor_bytes > 100e6 and peak < 12e6
    assert told == sorted(told) and told[-1] == (summary.tensor_bytes, summary.tensor_bytes)
    assert {total for _, total in told} == {summary.tensor_bytes}


def test_an_empty_directory_is_used_and_any_other_refused(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    write_checkpoint(target, SMALL, seed=1)
    before = digests(target)
    with pytest.raises(SyntheticError, match="not an empty directory") as caught:
        write_checkpoint(target, SMALL, seed=2)
    assert caught.value.exit_code == 2
    assert digests(target) == before
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "m", tmp_path / "missing" / "m"):
        with pytest.raises(SyntheticError, match=r"file|missing"):
            write_checkpoint(bad, SMALL, seed=1)
    assert {path.name for path in tmp_path.iterdir()} == {"m", "file"}


def test_a_disk_too_small_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(synthetic, "write_shard", lambda *arguments: pytest.fail("wrote"))
    with pytest.raises(SyntheticError, match=r"0\.07 GB free, the checkpoint needs 0\.00 GB"):
        write_checkpoint(tmp_path / "m", SMALL, seed=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise failure

    with pytest.raises(SyntheticError if isinstance(failure, OSError) else KeyboardInterrupt, match=r"No space|^$"):
        write_checkpoint(tmp_path / "m", SMALL, seed=1, progress=fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"added_slots": 23}, SyntheticError, "added_slots: found 23, expected at least 24"),
        ({"vocab_size": 287}, SyntheticError, "vocab_size: found 287, expected at least 288"),
        ({"sharding": "other"}, SyntheticError, "sharding: found 'other'"),
        ({"packed_shards": 0}, SyntheticError, "in 0 shards"),
        ({"moe_intermediate_size": 48}, ConfigError, "moe_intermediate_size: found 48"),
        ({"num_experts": 3}, ConfigError, "num_experts_per_token"),
        ({"mla_layers": (1, 7)}, ConfigError, "full_attn_layers"),
        ({"hidden_size": 0}, ConfigError, "hidden_size: found 0"),
    ],
)
def test_impossible_widths(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        write_checkpoint(tmp_path / "m", replace(SMALL, **change), seed=1)
    assert list(tmp_path.iterdir()) == []


def test_every_width_of_the_spec_reaches_the_config(tmp_path: Path) -> None:
    """Each field of the spec that ModelConfig has, changed alone, is what read_config gives back."""
    fields = {name: getattr(SMALL, name) for name in ModelConfig.__dataclass_fields__ if hasattr(SMALL, name)}
    changes: dict[str, Any] = {name: value + 32 for name, value in fields.items() if type(value) is int}
    changes |= {"num_experts_per_token": 5, "first_k_dense_replace": 3, "conv_kernel_size": 3, "num_hidden_layers": 7}
    changes |= {"moe_renormalize": False, "latent_moe_use_norm": False, "mla_layers": (0, 3)}
    changes |= dict.fromkeys(("routed_scaling_factor", "situ_beta", "situ_linear_beta", "rms_norm_eps"), 1.75)
    changes |= {"gate_lower_bound": -3.5}
    for name, value in changes.items():
        (tmp_path / "config.json").write_text(encode_config(replace(SMALL, **{name: value})))
        assert getattr(read_config(tmp_path), name) == value, name
    assert len(changes) >= 24
