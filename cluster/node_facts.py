"""What one node is and has, looked at in the process that runs there: cores, memory, versions, model and tape."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3ray.cluster.machine import ROOT, affinity, default_threads, memory_limits, physical_cores
from k3ray.cluster.node_speeds import node_speeds
from k3ray.cluster.roots_file import Roots
from k3ray.cluster.topology import ModelCopy, NodeFacts, NumaNode, TapeCopy
from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index, open_names, open_part
from k3ray.workers.checkpoint.index_table import TensorIndex
from k3ray.workers.checkpoint.names import numbers_of, template_of
from k3ray.workers.checkpoint.shard_files import list_shard_files
from k3ray.workers.failure import Failure
from k3ray.workers.memory_binding import parse_cpu_list
from k3ray.workers.model.config import read_config
from k3ray.workers.process_report import versions
from k3ray.workers.tape.manifest import TAPE_NAME, read_manifest

LAYER_STARTS = (f"{shapes.RELEASED_PREFIX}layers.#.", f"{shapes.CONVERTED_PREFIX}layers.#.")


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What is asked of a node. measure: its speeds, for about five seconds, rather than those that were kept."""

    node_id: str
    name: str
    address: str
    roots: Roots
    driver: bool
    threads: int | None = None
    measure: bool = False


def look(inquiry: Inquiry, root: Path = ROOT) -> NodeFacts:
    """Look at the node that this process runs on; a folder that cannot be used says why in its own record."""
    limits, threads = memory_limits(root), inquiry.threads or default_threads(root)
    numa = numa_nodes(root)
    models = tuple(look_at_model(Path(path)) for path in inquiry.roots.models)
    tapes = tuple(look_at_tape(Path(path)) for path in inquiry.roots.tapes)
    good = (
        [Path(copy.path) for copy in models if not copy.problem],
        [Path(tape.path) for tape in tapes if not tape.problem],
    )
    cores = [core for place in numa for core in place.cores]
    return NodeFacts(
        node_id=inquiry.node_id,
        name=inquiry.name,
        address=inquiry.address,
        cpus=len(affinity()),
        threads=threads,
        numa=numa,
        available_bytes=limits.available_bytes,
        decided_by=limits.decided_by,
        machine_bytes=limits.machine_bytes,
        speeds=node_speeds(*good, threads, cores, inquiry.measure),
        versions=tuple(versions().items()),
        models=models,
        tapes=tapes,
        driver=inquiry.driver,
    )


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """The memory nodes with an allowed core; one with everything where the system does not tell of several."""
    cores = physical_cores(root=root)
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cpus = parse_cpu_list((folder / "cpulist").read_text())
            rows = (line.split() for line in (folder / "meminfo").read_text().splitlines())
            kib = next((int(row[3]) for row in rows if len(row) > 3 and row[2] == "MemTotal:"), 0)
        except (OSError, ValueError):
            return _whole(root, cores)
        mine = tuple(core for core in cores if core in cpus)
        if mine:
            found.append(NumaNode(int(folder.name[4:]), mine, 1024 * kib))
    covered = {core for place in found for core in place.cores}
    return tuple(found) if covered == set(cores) else _whole(root, cores)


def look_at_model(path: Path) -> ModelCopy:
    """A whole copy with every tensor bound, or a part of one: which layers' shards are there."""
    try:
        config, files = read_config(path), list_shard_files(path)
        digest = _index_digest(files.index_path)
        present = {shard.name for shard in files.shards}
        if files.index_path is not None:
            names = open_names(path)
            if not {shard.name for shard in names.shards} <= present:
                return _part(path, names, present, digest, config.num_hidden_layers)
        index = open_index(path)
        bind(config, index)
    except Failure as failure:
        return ModelCopy(str(path), problem=str(failure))
    return ModelCopy(str(path), index.fingerprint, digest, True, tuple(range(config.num_hidden_layers)), True)


def look_at_tape(path: Path) -> TapeCopy:
    """A tape whose manifest is sound and whose file is as long as that says."""
    try:
        manifest = read_manifest(path)
        found = (path / TAPE_NAME).stat().st_size
    except Failure as failure:
        return TapeCopy(str(path), problem=str(failure))
    except OSError as error:
        return TapeCopy(str(path), problem=f"{TAPE_NAME}: {error.strerror}: copy it again")
    expected = manifest.identity.total_bytes
    problem = "" if found == expected else f"{found:,} bytes, expected {expected:,}: copy it again"
    return TapeCopy(str(path), manifest.digest, problem, manifest.identity.chunk_bytes)


def _part(path: Path, names: TensorIndex, present: set[str], digest: str, num_layers: int) -> ModelCopy:
    """A copy of some shards, whose headers are proven; that also leaves their index for the actors to come."""
    open_part(path)
    layers, top = layers_here(names, present, num_layers)
    return ModelCopy(str(path), "", digest, False, layers, top)


def layers_here(names: TensorIndex, present: set[str], num_layers: int) -> tuple[tuple[int, ...], bool]:
    """(the layers none of whose tensors is in a shard that is not present, whether the same holds of what is outside).

    names: of the index file.
    """
    here = np.array([shard.name in present for shard in names.shards])[names.columns.shard_ids]
    templates, (first, _) = template_of(names.columns.keys), numbers_of(names.columns.keys)
    in_layer = np.array([template.startswith(LAYER_STARTS) for template in names.names.templates])[templates]
    whole = np.ones(num_layers, dtype=bool)
    lacking = in_layer & ~here & (first < num_layers)
    whole[first[lacking]] = False
    text = np.array([_is_top(template) for template in names.names.templates])[templates]
    return tuple(int(layer) for layer in np.flatnonzero(whole)), bool(here[text].all())


def _is_top(template: str) -> bool:
    """Whether a name is of the text model's embedding, head, last norm or the like."""
    return "layers.#" not in template and (
        template.startswith(("model.", shapes.RELEASED_PREFIX)) or template.endswith(shapes.LM_HEAD)
    )


def _index_digest(path: Path | None) -> str:
    return "" if path is None else hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _whole(root: Path, cores: tuple[int, ...]) -> tuple[NumaNode, ...]:
    return (NumaNode(0, cores, memory_limits(root).machine_bytes),)
