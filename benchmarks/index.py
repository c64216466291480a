"""Indexing of a checkpoint with the released names and shapes: CPU seconds, bytes per tensor, peak memory.

The shards are real headers before sparse data, so a full-size checkpoint takes megabytes of disk:
    .venv/bin/python benchmarks/index.py --layers 93 --folder /tmp/index-benchmark
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path

from k3ray.workers.checkpoint import index_cache, shapes
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.header import read_header_bytes
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.index_build import build_index
from k3ray.workers.checkpoint.shapes import TensorType
from k3ray.workers.checkpoint.shard_files import list_shard_files
from k3ray.workers.model.config import ModelConfig, read_config

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT.parent / "shared" / "data" / "k3-release"


def shard_of_layer(config: ModelConfig, layer: int) -> dict[str, TensorType]:
    """All tensors of a layer by full name."""
    prefix = shapes.RELEASED_PREFIX
    table = {shapes.layer_name(prefix, layer, name): kind for name, kind in shapes.layer_tensors(config, layer).items()}
    for expert in range(config.num_experts if config.is_moe(layer) else 0):
        for name, kind in shapes.expert_tensors(config).items():
            table[shapes.expert_name(prefix, layer, expert, name)] = kind
    return table


def write_shard(path: Path, table: dict[str, TensorType]) -> None:
    """A shard with a true header and sparse data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in table.items():
        begin, end = end, end + math.prod(shape) * {"BF16": 2, "F32": 4, "U8": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_checkpoint(folder: Path, config: ModelConfig, layers: int, extra: int) -> None:
    """Shards and index of the first layers and, to reach a round number, `extra` vision tensors."""
    tables = [shard_of_layer(config, layer) for layer in range(layers)]
    top = shapes.top_tensors(config)
    tables.append({shapes.top_name(shapes.RELEASED_PREFIX, name): kind for name, kind in top.items()})
    tables.append({f"vision_tower.encoder.blocks.{number}.norm0.weight": ("BF16", (32,)) for number in range(extra)})
    places = {}
    for number, table in enumerate(tables, 1):
        name = f"model-{number:05d}-of-{len(tables):06d}.safetensors"
        write_shard(folder / name, table)
        places |= dict.fromkeys(table, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def measure(folder: Path, config: ModelConfig) -> dict[str, float]:
    """Index the folder without, with and from the cache, and bind it."""
    files = list_shard_files(folder)
    figures: dict[str, float] = {}
    start = time.process_time()
    for shard in files.shards:
        read_header_bytes(folder / shard.name)
    figures["read_cpu_s"] = time.process_time() - start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    index = build_index(files)
    figures["build_cpu_s"] = time.process_time() - start
    figures["peak_rise_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    figures["bytes_per_tensor"] = index.columns.nbytes / len(index)
    figures["tensors"] = len(index)
    cache = [folder / "cache" / "index"]
    (folder / "cache").mkdir(exist_ok=True)
    open_index(folder, cache)
    start = time.process_time()
    index = open_index(folder, cache)
    figures["open_cpu_s"] = time.process_time() - start
    files = list_shard_files(folder)
    path = index_cache.cache_path(cache[0], files.directory, files.stamp)
    figures["file_bytes_per_tensor"] = path.stat().st_size / len(index)
    start = time.process_time()
    bind(config, index)
    figures["bind_cpu_s"] = time.process_time() - start
    names = [f"language_model.model.layers.1.block_sparse_moe.experts.{e}.w1.weight_packed" for e in range(896)]
    start = time.process_time()
    for name in names:
        index.find(name)
    figures["find_cpu_us"] = (time.process_time() - start) / len(names) * 1e6
    return figures


def main() -> None:
    """Print the figures, with and without the checkpoint's own index file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=93)
    parser.add_argument("--extra", type=int, default=2948, help="vision tensors added to the text model's")
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    config = read_config(CONFIG).truncated(arguments.layers)
    folder = Path(tempfile.mkdtemp(prefix="index-benchmark-", dir=arguments.folder))
    try:
        # in another process, so that its memory does not hide the peak of ours
        writer = multiprocessing.get_context("spawn").Process(
            target=write_checkpoint, args=(folder, config, arguments.layers, arguments.extra)
        )
        writer.start()
        writer.join()
        index_file = folder / "model.safetensors.index.json"
        aside = folder / "index.json"
        index_file.rename(aside)  # first without it: the peak of the other way would hide this one's
        for kind in ("headers alone", "with index file"):
            for name, value in measure(folder, config).items():
                print(f"{kind:16s} {name:22s} {value:12.4f}")
            if aside.exists():
                aside.rename(index_file)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
