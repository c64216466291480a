"""Which files of a repository are needed: pure, from its names and, for part of the layers, from its index file."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from k3ray.download.hub import Listing
from k3ray.workers.checkpoint.binding import PREFIXES
from k3ray.workers.checkpoint.index_file import NAMES as INDEX_NAMES
from k3ray.workers.checkpoint.index_file import IndexFile
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure

CONFIG = "config.json"
TOKENIZER = ("tiktoken.model", "tokenizer_config.json")
_OPTIONAL = ("generation_config.json",)
_LAYERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


class SelectionError(Failure):
    """What was asked for is not in the repository."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Which shards hold which layer's tensors, as the index file says. top: what belongs to no layer."""

    shards: tuple[str, ...]
    by_layer: dict[int, frozenset[str]]
    top: frozenset[str]

    def holding(self, layers: range) -> frozenset[str]:
        """The shards with a tensor of these layers; raises SelectionError for a layer that is not there."""
        if not self.by_layer:
            raise SelectionError("--layers: the index names no layer of a text model; download all of it instead")
        missing = [layer for layer in layers if layer not in self.by_layer]
        if missing:
            raise SelectionError(
                f"--layers {layers.start}-{layers.stop - 1}: there is no layer {missing[0]}, expected layers within "
                f"{min(self.by_layer)}-{max(self.by_layer)} (zero-based)"
            )
        return frozenset().union(*(self.by_layer[layer] for layer in layers))

    def complete_layers(self, shards: frozenset[str]) -> list[int]:
        """The layers whose every tensor is in these shards."""
        return sorted(layer for layer, needed in self.by_layer.items() if needed <= shards)


def parse_layers(text: str) -> range:
    """Zero-based layers from `A-B` (both included) or `A`; raises SelectionError."""
    match = _LAYERS.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise SelectionError(f"--layers {text!r}: expected A-B with A <= B, zero-based, like 0-3")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def map_shards(index: IndexFile) -> ShardMap:
    """Read the layers' places off the index file's names."""
    by_layer: dict[int, set[str]] = defaultdict(set)
    top = set()
    starts = "|".join(re.escape(prefix) for prefix in PREFIXES)
    layer_of = re.compile(rf"(?:{starts})layers\.(\d{{1,5}})\.")
    text_top = re.compile(rf"(?:{starts})(?!layers\.|vision)|(?:language_model\.)?lm_head\.")
    for shard in index.shard_names:
        for name in index.names_in(shard).to_pylist():
            if match := layer_of.match(name):
                by_layer[int(match[1])].add(shard)
            elif text_top.match(name):
                top.add(shard)
    layers = {layer: frozenset(shards) for layer, shards in by_layer.items()}
    return ShardMap(index.shard_names, layers, frozenset(top))


def small_files(listing: Listing, tokenizer_only: bool) -> list[str]:
    """The files to fetch before the shards; raises SelectionError when one that is needed is not there."""
    names = set(listing.names)
    needed = TOKENIZER if tokenizer_only else (CONFIG, *TOKENIZER)
    missing = [name for name in needed if name not in names]
    if missing and (tokenizer_only or CONFIG in missing):
        raise SelectionError(f"{listing.repository}: has no {missing[0]} at {listing.commit}; is it the right --repo?")
    others = () if tokenizer_only else (*_OPTIONAL, *index_names(listing))
    return [name for name in (*needed, *others) if name in names]


def index_names(listing: Listing) -> list[str]:
    """The repository's index file, as a list of one or none: the plain one rather than the compressed."""
    return [name for name in INDEX_NAMES if name in listing.names][:1]


def all_shards(listing: Listing, shard_map: ShardMap | None) -> frozenset[str]:
    """Every shard of the checkpoint: those that its index names, or every safetensors file without an index.

    Raises SelectionError when the repository has none, or not all.
    """
    here = {name for name in listing.names if name.endswith(".safetensors")}
    if shard_map is None:
        if not here:
            raise SelectionError(f"{listing.repository}: has no .safetensors file at {listing.commit}")
        return frozenset(here)
    missing = sorted(set(shard_map.shards) - here)
    if missing:
        raise SelectionError(
            f"{listing.repository}: its index names {counted(len(shard_map.shards), 'shard')}, {len(missing):,} of "
            f"which the repository does not have at {listing.commit}, the first is {missing[0]}"
        )
    return frozenset(shard_map.shards)
