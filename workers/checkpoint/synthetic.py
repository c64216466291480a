"""Writing a synthetic checkpoint: the released format with seeded random values, at any widths, in bounded memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.safetensors_file import (
    PlannedTensor,
    cut_by_bytes,
    encode_header,
    encode_index,
    in_file_order,
    shard_name,
    write_shard,
)
from k3ray.workers.checkpoint.shapes import (
    RELEASED_PREFIX,
    expert_name,
    expert_tensors,
    layer_name,
    layer_tensors,
    top_name,
    top_tensors,
)
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec, encode_config, encode_generation_config
from k3ray.workers.checkpoint.synthetic_values import tensor_blocks
from k3ray.workers.checkpoint.synthetic_vocabulary import (
    MIN_ADDED_SLOTS,
    encode_ranks,
    encode_tokenizer_config,
    make_tokens,
)
from k3ray.workers.failure import Failure
from k3ray.workers.half_written import folder_beside
from k3ray.workers.model.config import ModelConfig, read_config

SPARE_BYTES = 64 << 20  # left free on the disk, besides the tensors: index, vocabulary, and whoever else writes


class SyntheticError(Failure):
    """A synthetic checkpoint that cannot be written as asked, or not there."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class SyntheticSummary:
    """What was written."""

    directory: Path
    num_shards: int
    num_tensors: int
    tensor_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The tensors of every shard, in the files' order, and the short name by which each gets its values."""

    shards: tuple[tuple[str, tuple[PlannedTensor, ...]], ...]
    short_names: dict[str, str]

    @property
    def num_tensors(self) -> int:
        """Tensors in all shards."""
        return len(self.short_names)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors' data."""
        return sum(tensor.num_bytes for _, tensors in self.shards for tensor in tensors)

    @property
    def shard_bytes(self) -> int:
        """Bytes of all shard files."""
        return self.tensor_bytes + sum(len(encode_header(tensors)) for _, tensors in self.shards)


def write_checkpoint(
    directory: Path, spec: SyntheticSpec, seed: int, progress: Callable[[int, int], None] | None = None
) -> SyntheticSummary:
    """Write the checkpoint of a spec; the same spec and seed give the same bytes.

    The directory must not exist, or be empty: everything is written beside it and renamed at the end. `progress` is
    told (bytes written, bytes in all). Raises SyntheticError, and ConfigError for widths that make no model.
    """
    _check_spec(spec)
    directory = directory.absolute()
    _check_free(directory)
    try:
        with folder_beside(directory) as beside:
            (beside / "config.json").write_text(encode_config(spec))
            config = read_config(beside)
            plan = plan_checkpoint(config, spec)
            _check_space(directory.parent, plan.shard_bytes)
            _write_small_files(beside, spec, seed, plan)
            _write_shards(beside, plan, config, seed, progress or (lambda done, total: None))
            file_bytes = sum(path.stat().st_size for path in beside.iterdir())
            beside.rename(directory)
    except OSError as error:
        raise SyntheticError(f"{directory}: the checkpoint could not be written ({error}); nothing was left") from error
    return SyntheticSummary(directory, len(plan.shards), plan.num_tensors, plan.tensor_bytes, file_bytes)


def plan_checkpoint(config: ModelConfig, spec: SyntheticSpec) -> CheckpointPlan:
    """Which tensors there are and which shard holds each.

    'release': layer l in shard l + 1, and the last holds what is outside the layers. 'packed': what is outside the
    layers, then every layer's trunk, then every layer's experts, cut into `packed_shards` of about equal bytes, so
    that layers share shards and experts lie apart from their trunk, as in converted checkpoints.
    """
    short_names: dict[str, str] = {}

    def planned(name: str, short: str, tensor_type: tuple[str, tuple[int, ...]]) -> PlannedTensor:
        short_names[name] = short
        return PlannedTensor(name, *tensor_type)

    prefix = RELEASED_PREFIX
    layers = range(config.num_hidden_layers)
    top = [planned(top_name(prefix, short), short, kind) for short, kind in top_tensors(config).items()]
    trunks = [
        [planned(layer_name(prefix, layer, short), short, kind) for short, kind in layer_tensors(config, layer).items()]
        for layer in layers
    ]
    experts = [
        [
            planned(expert_name(prefix, layer, expert, short), short, kind)
            for expert in range(config.num_experts if config.is_moe(layer) else 0)
            for short, kind in expert_tensors(config).items()
        ]
        for layer in layers
    ]
    if spec.sharding == "release":
        groups = [[*trunk, *expert] for trunk, expert in zip(trunks, experts, strict=True)] + [top]
    else:
        groups = cut_by_bytes([*top, *chain(*trunks), *chain(*experts)], spec.packed_shards)
    names = [shard_name(number, len(groups)) for number in range(1, len(groups) + 1)]
    return CheckpointPlan(
        tuple((name, tuple(in_file_order(group))) for name, group in zip(names, groups, strict=True)), short_names
    )


def _check_spec(spec: SyntheticSpec) -> None:
    if spec.added_slots < MIN_ADDED_SLOTS:
        raise SyntheticError(f"added_slots: found {spec.added_slots}, expected at least {MIN_ADDED_SLOTS}")
    if spec.num_ranks < 256:
        raise SyntheticError(
            f"vocab_size: found {spec.vocab_size}, expected at least {256 + spec.added_slots}: "
            f"the 256 single bytes and {spec.added_slots} added slots"
        )
    if spec.sharding not in ("release", "packed") or spec.packed_shards < 1:
        found = f"{spec.sharding!r} in {spec.packed_shards} shards"
        raise SyntheticError(f"sharding: found {found}, expected 'release', or 'packed' in at least one shard")


def _check_free(directory: Path) -> None:
    try:
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise SyntheticError(f"{directory}: exists and is not an empty directory; name a new one or remove it")
    except OSError as error:
        raise SyntheticError(f"{directory}: cannot be made there ({error})") from error


def _check_space(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed + SPARE_BYTES:
        raise SyntheticError(
            f"{parent}: {free / 1e9:.2f} GB free, the checkpoint needs {needed / 1e9:.2f} GB and "
            f"{SPARE_BYTES / 1e9:.2f} GB to spare; free some space or name another disk"
        )


def _write_small_files(folder: Path, spec: SyntheticSpec, seed: int, plan: CheckpointPlan) -> None:
    tokens = make_tokens(spec.vocabulary_text, spec.num_ranks, seed)
    (folder / "tiktoken.model").write_bytes(encode_ranks(tokens))
    (folder / "tokenizer_config.json").write_text(encode_tokenizer_config(spec.num_ranks, spec.added_slots))
    (folder / "generation_config.json").write_text(encode_generation_config(spec))
    (folder / "model.safetensors.index.json").write_text(encode_index(plan.shards))


def _write_shards(
    folder: Path, plan: CheckpointPlan, config: ModelConfig, seed: int, progress: Callable[[int, int], None]
) -> None:
    total, done = plan.tensor_bytes, 0

    def blocks(tensor: PlannedTensor) -> Iterator[npt.NDArray[np.generic]]:
        return tensor_blocks(seed, tensor, plan.short_names[tensor.name], config.kda_num_heads)

    def wrote(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    for name, tensors in plan.shards:
        write_shard(folder / name, tensors, blocks, wrote)
