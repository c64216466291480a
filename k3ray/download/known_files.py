"""Where the expected sizes and checksums of a folder's files come from, in this order: its download's note, the hub,
the sizes published for the release, a list beside the shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3ray.download.hub import HubFile, Listing
from k3ray.download.record import Record, read_record
from k3ray.download.release import is_released, read_release
from k3ray.workers.checkpoint.index_file import IndexFile, IndexFileError, find_index_file, read_index_file
from k3ray.workers.checkpoint.shard_files import PUBLISHED_SIZES, published_sizes
from k3ray.workers.model.config import ConfigError, ModelConfig, read_config


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a folder before its shards are read.

    config, index: as read, or None with what is wrong with them. released: whether they are the release's. sizes: the
    expected bytes by shard, and sizes_from who says so. files: with checksums. expected: the shards that should be
    here; partial: how many of all these are, where the download was of a part.
    """

    config: ModelConfig | None
    config_problem: str | None
    index: IndexFile | None
    index_name: str | None
    index_problem: str | None
    record: Record | None
    released: bool
    files: dict[str, HubFile]
    sizes: dict[str, int]
    sizes_from: str | None
    expected: frozenset[str]
    partial: str | None


def read_known(directory: Path, listing: Listing | None = None) -> Known:
    """Read the small files of a folder; a listing of the hub, where there is one, gives the checksums."""
    config, config_problem = _config(directory)
    index, index_name, index_problem = _index(directory)
    record = read_record(directory)
    release = read_release()
    released = is_released(release, config, index)
    files = _files(record, listing)
    sizes, sizes_from = _sizes(directory, files, record, listing, release.sizes if released else {})
    stated = frozenset(index.shard_names) if index is not None else frozenset(sizes)
    wanted = record.wanted & stated if record is not None else frozenset()
    partial = f"{len(wanted)} of {len(stated)} shards were asked for" if wanted and wanted < stated else None
    return Known(
        config=config,
        config_problem=config_problem,
        index=index,
        index_name=index_name,
        index_problem=index_problem,
        record=record,
        released=released,
        files=files,
        sizes=sizes,
        sizes_from=sizes_from,
        expected=wanted if partial else stated,
        partial=partial,
    )


def _config(directory: Path) -> tuple[ModelConfig | None, str | None]:
    try:
        return read_config(directory), None
    except ConfigError as error:
        return None, str(error)


def _index(directory: Path) -> tuple[IndexFile | None, str | None, str | None]:
    try:
        path = find_index_file(directory)
    except IndexFileError as error:
        return None, error.path.name, str(error)
    if path is None:
        return None, None, None
    try:
        return read_index_file(path), path.name, None
    except IndexFileError as error:
        return None, path.name, str(error)


def _files(record: Record | None, listing: Listing | None) -> dict[str, HubFile]:
    """What is known with checksums: of a download only what it was asked for, for the rest may be another model's."""
    if record is not None:
        return {name: file for name, file in record.files.items() if name in record.wanted}
    return dict(listing.files) if listing is not None else {}


def _sizes(
    directory: Path,
    files: dict[str, HubFile],
    record: Record | None,
    listing: Listing | None,
    published: dict[str, int],
) -> tuple[dict[str, int], str | None]:
    noted = {name: file.size for name, file in files.items() if name.endswith(".safetensors")}
    if noted:
        where = "the hub's metadata" + (", noted when it was downloaded" if record is not None else "")
        return noted, where
    if published:
        return published, "the sizes published for the release"
    beside = published_sizes(directory)
    return beside, PUBLISHED_SIZES if beside else None
