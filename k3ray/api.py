"""The Python API: open a model with a plan, generate, read the report, close. The commands are thin over it.

from k3ray.api import open_model

with open_model() as model:
    generation = model.generate(prompt="Hello", gen=8)
    print(generation.text, generation.generated_ids)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from k3ray.cluster.machine import default_threads, physical_cores
from k3ray.cluster.plan import make_plan
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.cluster.wishes import Wishes, merge_wishes
from k3ray.environment import read_environment
from k3ray.memory import MemoryWish, choose_tape
from k3ray.model import Model
from k3ray.model_source import find_model
from k3ray.placing import cluster_wish
from k3ray.report import Generation, Settings
from k3ray.starting import RunRequest
from k3ray.transcript import Token
from k3ray.whole_number import whole_number
from k3ray.workers.checkpoint.leftovers import unused_line
from k3ray.workers.checkpoint.mirrors import refuse_other_experts
from k3ray.workers.loading import CheckpointSpec, open_what_is_here
from k3ray.workers.model.config import read_config, unknown_line

__all__ = ["Generation", "Model", "Settings", "Token", "open_model"]

Say = Callable[[str], None]


def open_model(
    model_dir: Path | str | None = None,
    *,
    config: Path | str | None = None,
    layers: int | None = None,
    stages: int | None = None,
    expert_shards: int | None = None,
    threads: int | None = None,
    tok: Path | str | None = None,
    tape: Path | str | None = None,
    mirror: Path | str | Sequence[Path | str] = (),
    memory: str | None = None,
    preset: str | None = None,
    trunk_gb: str | float | None = None,
    cache_gb: str | float | None = None,
    wishes: Wishes | None = None,
    plan: Path | str | None = None,
    roots: Path | str | None = None,
    context: int | None = None,
    snapshot_every: int = 64,
    max_recoveries: int = 3,
    say: Say = lambda line: None,
) -> Model:
    """Check a checkpoint and plan its processes; nothing is started before the first token is asked for.

    model_dir: the checkpoint's folder; default K3_MODEL_DIR, else the embedded model. config: a config.json elsewhere.
    layers: run only the first so many layers. stages: processes that share the layers (default 1, in a cluster one a
    node). expert_shards: processes that hold the routed experts (0: the stages hold them, the default on one host; in
    a cluster one a node). threads: of all processes of this host together; default OMP_NUM_THREADS, else the physical
    cores that this process may use. tok: the vocabulary.

    tape: what `k3ray pack` wrote, to stream the trunk from. mirror: a folder or folders with copies of the checkpoint,
    for an expert that the first cannot give. memory (like "24G", of all processes of this host) or preset, trunk_gb and
    cache_gb divide the memory; with none of them everything is resident if it fits, else as much as there is.
    wishes: the same, merged already. context: positions to plan for; default those of the first generation.

    plan: what `k3ray plan --out` wrote: who gets what on which node. roots: a TOML file with the folders of model and
    tape by node. Without a plan one is made when the Ray cluster that is joined has several nodes; memory is then each
    node's.
    snapshot_every: steps between snapshots of the state, from which a lost stage goes on (0: none are taken).
    max_recoveries: how often the run may replace actors that died. say: hears one line about each thing done.

    Raises a Failure (its exit_code says of which kind) when anything is missing, not understood or does not fit.
    """
    given = {
        "--layers": layers, "--stages": stages, "--expert-shards": expert_shards, "--threads": threads,
        "--snapshot-every": snapshot_every, "--max-recoveries": max_recoveries,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            whole_number(name, value)
    if context is not None:
        whole_number("context", context, low=1)
    environment = read_environment()
    source = find_model(_path(model_dir), _path(tok), environment)
    say(source.describe())
    if wishes is None:
        flags = {"--preset": preset, "--memory": memory, "--trunk-gb": trunk_gb, "--cache-gb": cache_gb}
        wishes = merge_wishes((flag, str(value)) for flag, value in flags.items() if value is not None)
    config_path = _path(config)
    full = read_config(config_path or source.model_dir)
    num_layers = full.num_hidden_layers if layers is None else layers
    full.truncated(num_layers)
    spec = CheckpointSpec(source.model_dir, config_path, num_layers, _folders(mirror))
    if threads is None:
        threads = environment.threads or default_threads()
    recovery = RecoverySettings(snapshot_every, max_recoveries)
    settings = Settings(stages or 1, expert_shards or 0, threads, num_layers)
    one_host = make_plan(spec, 1 if stages is None else stages, expert_shards or 0, threads, physical_cores())
    checkpoint = open_what_is_here(spec)
    for line in filter(None, (unknown_line(config_path or source.model_dir), unused_line(checkpoint.binding.left))):
        say(f"warning: {line}")
    for mirror_root in checkpoint.mirrors:
        refuse_other_experts((checkpoint.binding, checkpoint.reader), mirror_root)
    folders = (source.model_dir, *spec.mirrors)
    cluster = cluster_wish(
        checkpoint.config, folders, _path(tape), stages, expert_shards, wishes, _path(plan), _path(roots), layers
    )
    choice = choose_tape(checkpoint, Path(tape), say) if tape is not None and not checkpoint.partial else None
    memory_wish = MemoryWish(choice, wishes, context)
    address = environment.ray_address
    request = RunRequest(spec, checkpoint, one_host, memory_wish, cluster, recovery, threads, address)
    return Model(source, request, settings, say)


def _folders(given: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    """One folder or several; a text is one name, not a sequence of letters."""
    return (Path(given),) if isinstance(given, str | Path) else tuple(Path(folder) for folder in given)


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)
