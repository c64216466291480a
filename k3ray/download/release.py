"""The released repository as a fact: which revision is pinned, and the published size of each of its shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.checkpoint.index_file import IndexFile
from k3ray.workers.checkpoint.safetensors_file import shard_name
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig

_SHAPE = {  # what tells the released text model from every other
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "vocab_size": 163840,
    "intermediate_size": 33792,
    "num_experts": 896,
    "routed_expert_hidden_size": 3584,
    "moe_intermediate_size": 3072,
}


class ReleaseError(Failure):
    """The package's own list of published sizes is damaged."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Release:
    """repository, revision: where it was published. sizes: bytes of each shard by name."""

    repository: str
    revision: str
    sizes: dict[str, int]
    num_tensors: int
    tensor_bytes: int

    @property
    def file_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.sizes.values())


def read_release(path: Path | None = None) -> Release:
    """Read the list that travels with the package; raises ReleaseError when it does not add up."""
    path = path or Path(__file__).with_name("release.txt")
    fields: dict[str, str] = {}
    sizes: dict[int, int] = {}
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words and words[0] == "shard":
                sizes[int(words[1])] = int(words[2])
            elif words and not line.startswith("#"):
                fields[words[0]] = words[1]
        count = int(fields["shards"])
        release = Release(
            fields["repository"],
            fields["revision"],
            {shard_name(number, count): size for number, size in sorted(sizes.items())},
            int(fields["tensors"]),
            int(fields["tensor_bytes"]),
        )
        stated = int(fields["bytes"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ReleaseError(f"{path}: cannot be read ({error!r}); install k3ray again") from None
    if sorted(sizes) != list(range(1, count + 1)) or release.file_bytes != stated:
        raise ReleaseError(
            f"{path}: found {len(sizes)} shards of {release.file_bytes} bytes, expected {count} of {stated}; "
            "install k3ray again"
        )
    return release


def is_released(release: Release, config: ModelConfig | None, index: IndexFile | None) -> bool:
    """Whether a checkpoint is the released one by its config and index, of which one may be missing or unreadable."""
    by_config = config is not None and all(getattr(config, name) == value for name, value in _SHAPE.items())
    by_index = index is not None and (list(index.shard_names), len(index.names)) == (
        sorted(release.sizes),
        release.num_tensors,
    )
    if config is not None and index is not None:
        return by_config and by_index
    return by_config or by_index
