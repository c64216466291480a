"""What this host can do with one model: whether it is whole, what each preset gives, how fast, and what to run next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from k3ray.cluster.budget import MemoryFailure, plan_budget, resident_plan, smallest_plan
from k3ray.cluster.budget_plan import HostRun, gigabytes
from k3ray.cluster.devices import CHUNK, EXPERT, DeviceFailure, DiskSpeed, measurable_files, measure_disk
from k3ray.cluster.doctor import NOTE, OK, STOP, Finding
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.wishes import Wishes
from k3ray.workers.checkpoint.census import Census, read_census
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.layout import TapeLayout, plan_layout
from k3ray.workers.tape.manifest import TAPE_NAME, read_manifest

DOCTOR_SECONDS = 1.0  # of each figure of the disk


def examine_model(model_dir: Path) -> tuple[Finding, Census | None]:
    """Bind every tensor of the text model; what is wrong with it stops the runs of this model."""
    try:
        census = read_census(model_dir)
    except Failure as failure:
        return Finding("model", str(model_dir), STOP, str(failure)), None
    parts = f"{counted(census.num_layers, 'layer')}, {counted(census.num_experts, 'expert')}"
    found = f"{model_dir}: {parts}, {gigabytes(census.bound_bytes)}"
    if not census.shapes_checked:
        return Finding("model", f"{found}; names only", STOP, "put the shards into this folder"), census
    return Finding("model", f"{found}; all {census.num_bound:,} tensors bound"), census


def examine_tape(tape: Path, config: ModelConfig) -> tuple[Finding, TapeLayout | None]:
    """Whether the folder holds a tape of such a model; its bits are proven by `k3ray pack --verify` alone."""
    try:
        manifest = read_manifest(tape)
        layout = plan_layout(config, manifest.identity.chunk_bytes)
    except Failure as failure:
        return Finding("tape", str(tape), STOP, str(failure)), None
    if layout.total_bytes != manifest.identity.total_bytes:
        found = f"{tape}: {manifest.identity.total_bytes:,} bytes, of the model {manifest.identity.model}"
        advice = f"expected {layout.total_bytes:,} bytes for this model: name its own tape, or `k3ray pack` it"
        return Finding("tape", found, STOP, advice), None
    file = tape / TAPE_NAME
    nbytes = file.stat().st_size if file.is_file() else 0
    if nbytes != layout.total_bytes:
        advice = f"expected {layout.total_bytes:,} bytes: copy it again, or `k3ray pack` the model again"
        return Finding("tape", f"{file}: {nbytes:,} bytes", STOP, advice), None
    return Finding("tape", f"{tape}: {gigabytes(layout.total_bytes)}"), layout


def examine_disk(
    model_dir: Path, tape: Path | None, say: Callable[[str], None]
) -> tuple[list[Finding], list[DiskSpeed]]:
    """Measure where the experts are and where the trunk is or would be; no figure where the files are too small."""
    findings, speeds = [], []
    sources = [("storage of the model", model_dir, (CHUNK, EXPERT) if tape is None else (EXPERT,))]
    sources += [] if tape is None else [("storage of the tape", tape / TAPE_NAME, (CHUNK,))]
    for subject, path, kinds in sources:
        try:
            measured = measure_disk(measurable_files(path), DOCTOR_SECONDS, say, kinds)
        except DeviceFailure:
            findings.append(Finding(subject, "not measured: no file of a size that tells anything"))
            continue
        except Failure as failure:
            findings.append(Finding(subject, str(path), STOP, str(failure)))
            continue
        speeds += measured
        figures = ", ".join(
            f"{speed.kind}s {speed.bytes_per_s / 1e9:.2f} GB/s at depth {speed.depth}" for speed in measured
        )
        direct = all(speed.direct for speed in measured)
        advice = "" if direct else "O_DIRECT is refused here: read through the page cache, whose speed this may be"
        findings.append(Finding(subject, figures, OK if direct else NOTE, advice))
    return findings, speeds


def next_step(run: HostRun, model_dir: str, tape: Path | None, ask: str, limits: MemoryLimits) -> Finding:
    """The exact command that runs this model here. model_dir: empty for the embedded one. ask: the prompt's option."""
    generate = " ".join(["k3ray generate", *([model_dir] if model_dir else [])])
    if resident_plan(run).total_bytes <= limits.available_bytes:
        return Finding("next", f"{generate} {ask}", OK, "everything fits in memory")
    try:
        plan = plan_budget(run, Wishes(), limits)
    except MemoryFailure:
        least = gigabytes(smallest_plan(run).total_bytes)
        found = f"{gigabytes(limits.available_bytes)} of memory are available, the least this model needs is {least}"
        return Finding("next", found, STOP, f"free memory, or raise the limit {limits.decided_by}")
    if tape is not None:
        return Finding("next", f"{generate} --tape {tape} {ask}", OK, plan.describe())
    assert run.layout is not None
    trunk = f"the trunk ({gigabytes(run.layout.total_bytes)} on a fast disk) is then streamed"
    return Finding("next", f"k3ray pack {model_dir} {model_dir.rstrip('/')}.tape", OK, trunk)


def model_run(config: ModelConfig, layout: TapeLayout | None, threads: int, positions: int) -> HostRun:
    """The usual run: one stage with its experts, from a tape (its own layout where none is packed yet)."""
    cuts = (0, config.num_hidden_layers)
    return HostRun(config, layout or plan_layout(config), cuts, 0, threads, positions)
