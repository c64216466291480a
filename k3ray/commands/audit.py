"""k3ray audit: a checkpoint's statements with their kinds, as tables, JSON and a page, from a folder or a server."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from k3ray.amounts import decimal_size
from k3ray.audit.address import HUB
from k3ray.audit.executed import golden_statements, has_golden, kda_statements
from k3ray.audit.http_files import HttpFiles
from k3ray.audit.kda_cases import run_cases
from k3ray.audit.making import AuditOptions, make_audit
from k3ray.audit.snapshot import Snapshot, Statement
from k3ray.audit.snapshot_file import encode_snapshot
from k3ray.audit.source_files import DirectoryFiles, SourceFiles
from k3ray.cluster.machine import default_threads
from k3ray.commands.audit_tables import print_snapshot
from k3ray.commands.terminal import say
from k3ray.environment import Environment, read_environment
from k3ray.files import check_writable, write_file
from k3ray.model_source import find_model
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure

SECONDS_BETWEEN_LINES = 5.0


class OutputsClash(Failure):
    """Two outputs in one file."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What the command line asks for. source: a folder or an http(s) address, None: K3_MODEL_DIR or the embedded
    model."""

    source: str | None
    out: Path | None
    page: Path | None
    layers: str | None
    probe: bool
    as_json: bool


def run(request: AuditRequest) -> None:
    """Audit, print, write; raises typer.Exit(1) when something disagrees that must agree."""
    for path, option in ((request.out, "--out"), (request.page, "--page")):
        if path is not None:
            check_writable(path, option)
    if request.out is not None and request.out == request.page:
        raise OutputsClash(f"--page {request.page}: found the file of --out, expected another")
    environment = read_environment()
    threads = (environment.threads or default_threads()) if request.probe else 0
    with _opened(request.source, environment) as files:
        say(f"auditing {files.address} ({files.kind})")
        options = AuditOptions(request.layers, threads)
        snapshot = make_audit(files, options, lambda: _executed(files), _Progress().update)
    written = []
    if request.out is not None:
        write_file(request.out, encode_snapshot(snapshot))
        written.append(str(request.out))
    if request.page is not None:
        from k3ray.audit.page import render

        write_file(request.page, render(snapshot).encode("utf-8"))
        written.append(str(request.page))
    if request.as_json:
        print(encode_snapshot(snapshot).decode("utf-8"), end="")
    else:
        print_snapshot(snapshot)
    say(conclusion(snapshot, written, request))
    if snapshot.disagreements:
        raise typer.Exit(1)


@contextmanager
def _opened(source: str | None, environment: Environment) -> Iterator[SourceFiles]:
    """The files of a source, their connections closed at the end."""
    if source is None or "://" not in source:
        yield DirectoryFiles(Path(source) if source is not None else find_model(None, None, environment).model_dir)
        return
    files = HttpFiles(source, environment.hf_token, environment.hf_endpoint or HUB, say=say)
    try:
        yield files
    finally:
        files.close()


def _executed(files: SourceFiles) -> list[Statement]:
    """What this audit runs on this machine."""
    say("executing: the chunked KDA form against the recurrence")
    found = kda_statements(run_cases())
    if isinstance(files, DirectoryFiles) and has_golden(files.directory):
        say("executing: the golden's prompts through the whole model")
        found += golden_statements(files.directory)
    return found


def conclusion(snapshot: Snapshot, written: list[str], request: AuditRequest) -> str:
    """The last line: what was found, what was fetched and written, what comes next."""
    wrong = len(snapshot.disagreements)
    agreeing = sum(statement.agrees is True for statement in snapshot.statements)
    source = snapshot.source
    verdict = f"{counted(agreeing, 'statement')} {'agrees' if agreeing == 1 else 'agree'}, "
    verdict += f"{wrong} DISAGREE (listed first)" if wrong else "none disagrees"
    read = f"read {decimal_size(source.fetched_bytes)}"
    if source.total_bytes:
        share = 100 * source.fetched_bytes / source.total_bytes
        read += f", {share:.3g} % of the shards' {decimal_size(source.total_bytes)}"
    read += f", in {counted(source.requests, 'request')}" if source.kind == "http" else ""
    # what the user typed may hold a password; the address that was made of it does not
    name = source.address if source.kind == "http" or request.source is None else request.source
    if wrong:
        following = "fetch again what is named above, or correct config.json, and audit again"
    elif request.page is not None:
        following = f"open {shlex.quote(str(request.page))} in a browser"
    else:
        following = f"k3ray audit {shlex.quote(name)} --out audit.json --page audit.html"
    return f"{verdict}; {read}; wrote {' and '.join(written) if written else 'nothing'}; next: {following}"


class _Progress:
    """How far the stages are, as a line now and then."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def update(self, doing: str, done: int, total: int) -> None:
        """Say it when the last line is long ago."""
        if time.monotonic() - self._said < SECONDS_BETWEEN_LINES:
            return
        self._said = time.monotonic()
        size = decimal_size if doing == "tensors" else str
        say(f"{doing}: {size(done)} of {size(total)}")
