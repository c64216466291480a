"""k3ray download: a checkpoint, or part of one, from the hub into a folder, proven, and to be gone on with any time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from k3ray.amounts import decimal_size, duration
from k3ray.commands.hub_choice import choose_hub
from k3ray.commands.terminal import say
from k3ray.commands.transfer_progress import TransferProgress
from k3ray.commands.verify import conclude, prove
from k3ray.download.download import Summary, Wish, download
from k3ray.download.hub import Hub
from k3ray.download.patience import Patience
from k3ray.download.selection import SelectionError, parse_layers
from k3ray.environment import read_environment
from k3ray.workers.counted import counted

MAX_WORKERS = 32


def run(
    directory: Path,
    repo: str | None,
    revision: str | None,
    endpoint: str | None,
    tokenizer_only: bool,
    layers: str | None,
    workers: int,
    deep: bool,
    stall_timeout: int,
    as_json: bool,
) -> None:
    """Download what is asked for; the last line says what was done and what comes next."""
    if not 1 <= workers <= MAX_WORKERS:
        raise SelectionError(f"--workers {workers}: expected 1 to {MAX_WORKERS}")
    if not 1 <= stall_timeout <= 3600:
        raise SelectionError(f"--stall-timeout {stall_timeout}: expected 1 to 3600 seconds")
    if layers is not None and tokenizer_only:
        raise SelectionError("--layers and --tokenizer-only: the tokenizer has no layers; give one of them")
    for option, text in (("--repo", repo), ("--revision", revision)):
        if text is not None and not text.strip():
            raise SelectionError(f"{option}: found nothing after it; name one, or leave {option} out for the release's")
    chosen = None if layers is None else parse_layers(layers)
    hub = choose_hub(endpoint, read_environment())
    wish = Wish(directory, repo, _normal(revision), tokenizer_only, chosen, workers, deep)
    say(f"from {hub.endpoint} ({hub.said_by}) into {directory}; {_about_token(hub)}")
    try:
        with TransferProgress() as progress:
            summary = download(wish, hub, Patience(stall_s=stall_timeout), say, progress.update)
    except (KeyboardInterrupt, SystemExit):  # the latter: a request to end this process
        say("stopped: every byte that arrived is kept; the same command goes on from there")
        raise
    _tell(summary)
    verdict = prove(directory, tokenizer_only, quiet=as_json)
    if as_json:
        print(json.dumps({**asdict(summary), "verified": verdict.passed}, indent=1))
    if not verdict.passed:
        conclude(verdict, directory)
    say(_next_step(directory, tokenizer_only, verdict.partial is not None))


def _normal(revision: str | None) -> str | None:
    if revision is None:
        return None
    lower = revision.lower()
    return lower if len(lower) == 40 and all(digit in "0123456789abcdef" for digit in lower) else revision


def _about_token(hub: Hub) -> str:
    if hub.token is None:
        return "without a token (HF_TOKEN is not set)"
    return f"HF_TOKEN goes to {hub.host} only" if hub.sends_token else "HF_TOKEN is not sent: the line is unencrypted"


def _tell(summary: Summary) -> None:
    rate = summary.fetched_bytes / max(summary.seconds, 1e-9)
    again, are = "", "is" if summary.num_files == 1 else "are"
    if summary.transferred_again_bytes:
        again = f", {decimal_size(summary.transferred_again_bytes)} came again from a server that ignores ranges"
    kept = f"{summary.kept_files} of them kept from before, " if summary.kept_files else ""
    say(
        f"downloaded {summary.repository} at {summary.commit}: {counted(summary.num_files, 'file')} of "
        f"{decimal_size(summary.num_bytes)} {are} here, {kept}{decimal_size(summary.fetched_bytes)} fetched in "
        f"{duration(summary.seconds)} ({decimal_size(int(rate))}/s){again}"
    )
    if summary.layers is not None:
        top = "here" if summary.top_complete else "not all here"
        say(f"complete layers: {spans(summary.layers)}; the embedding, the final norm and the head are {top}")


def spans(numbers: list[int]) -> str:
    """Ascending numbers as spans: 0-3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) or "none"


def _next_step(directory: Path, tokenizer_only: bool, partial: bool) -> str:
    if tokenizer_only:
        return (
            f"done: the tokenizer is in {directory}; next: k3ray generate MODEL_DIR --tok {directory} --prompt 'Hello'"
        )
    if partial:
        return f"done: part of the model is in {directory}; next: k3ray download {directory} for the rest"
    return f"done: all of it is in {directory}, each file's checksum compared; next: k3ray doctor {directory}"
