"""Makes an audit: opens the source, counts, reads, probes, and puts everything said into one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from k3ray.audit.artifact import Artifact, open_artifact
from k3ray.audit.chosen_tensors import Values, parse_layers, read_values
from k3ray.audit.claims import said
from k3ray.audit.counting import count_kinds, count_layers, rules_of
from k3ray.audit.file_claims import file_statements
from k3ray.audit.layer_claims import layer_statements
from k3ray.audit.parameter_claims import parameter_statements
from k3ray.audit.probe import probe_routers
from k3ray.audit.recorded import RECORDED, compare_recorded, recorded_statistics, unresolved_statements
from k3ray.audit.snapshot import Probe, Snapshot, Source, Statement
from k3ray.audit.source_files import SourceFiles
from k3ray.audit.statistics import statistic_rows
from k3ray.audit.tensor_claims import tensor_statements

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """layers: as --layers says it, None for the default choice. threads: of the probe, which is left out at 0."""

    layers: str | None = None
    threads: int = 1


def make_audit(
    files: SourceFiles,
    options: AuditOptions = AuditOptions(),
    execute: Callable[[], Sequence[Statement]] = tuple,
    progress: Progress = lambda doing, done, total: None,
) -> Snapshot:
    """Audit a checkpoint; raises what its readers refuse.

    execute: runs what is to run here, once everything is read, and gives its statements, of kind X (executed.py).
    progress: told (what is being done, steps or bytes done, in all).
    """
    artifact = open_artifact(files, lambda done, total: progress("headers", done, total))
    chosen = None if options.layers is None else parse_layers(options.layers, artifact.config)
    rules = rules_of(artifact)
    kinds, layers = count_kinds(artifact, rules), count_layers(artifact, rules)
    values = None
    if artifact.index.has_shapes:
        values = read_values(artifact, chosen, lambda done, total: progress("tensors", done, total))
    rows = statistic_rows(artifact, values) if values is not None else ()
    probe = _probe(artifact, values, options, progress)
    statements = [
        *layer_statements(artifact, layers),
        *tensor_statements(artifact, rules, kinds),
        *file_statements(artifact, rules, kinds),
        *parameter_statements(artifact, kinds, values),
        *compare_recorded(artifact.config, rows),
        _probe_statement(probe, options),
        *_executed(execute()),
        *unresolved_statements(),
    ]
    return Snapshot(
        made_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        k3ray=version("k3ray"),
        source=_source(artifact),
        statements=tuple(statements),
        layers=layers,
        kinds=kinds,
        statistics=(*rows, *recorded_statistics()),
        probe=probe,
        recorded=RECORDED,
    )


def _source(artifact: Artifact) -> Source:
    files = artifact.files
    return Source(
        kind=files.kind,
        address=files.address,
        revision=files.revision,
        total_bytes=artifact.total_bytes,
        fetched_bytes=files.ledger.fetched_bytes,
        files=files.ledger.rows(),
        requests=files.ledger.requests,
    )


def _probe(artifact: Artifact, values: Values | None, options: AuditOptions, progress: Progress) -> Probe | None:
    if values is None or not options.threads:
        return None
    config = artifact.config
    return probe_routers(config, values, options.threads, lambda done, total: progress("probe", done, total))


def _probe_statement(probe: Probe | None, options: AuditOptions) -> Statement:
    id, subject = "router.probe", "routers under synthetic isotropic inputs"
    if probe is None:
        why = "no router was read" if options.threads else "left out: --no-probe"
        return said(id, "parameters", "U", subject, why, "")
    one, *_, last = sorted(row.with_bias.cv for row in (*probe.layers, *probe.layers))
    idle = sum(row.with_bias.without_load for row in probe.layers)
    overlap = sum(row.overlap for row in probe.layers) / len(probe.layers)
    found = (
        f"load CV {one:.3f} to {last:.3f} over {len(probe.layers)} layers (by chance {probe.chance_cv:.3f}), "
        f"{idle} experts without load; {100 * overlap:.1f} % of the choices are the same without the bias"
    )
    source = f"{probe.inputs:,} seeded inputs of RMS 1, no text: it says nothing about routing of text"
    return said(id, "parameters", "S", subject, found, source)


def _executed(executed: Sequence[Statement]) -> list[Statement]:
    """What ran here; where nothing did, that it did not."""
    found = list(executed)
    for start, subject in (
        ("kda.chunked", "the chunked KDA form against the recurrence"),
        ("golden.logits", "logits against a golden of the official code"),
    ):
        if not any(statement.id.startswith(start) for statement in found):
            why = "no golden lies beside this checkpoint" if start == "golden.logits" else "not executed in this audit"
            found.append(said(start, "boundary", "U", subject, why, ""))
    return found
