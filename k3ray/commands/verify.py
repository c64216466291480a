"""k3ray verify: a checkpoint folder proven, as a table or as JSON, with the files to fetch again; and their repair."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from k3ray.amounts import decimal_size
from k3ray.commands.hub_choice import choose_hub
from k3ray.commands.terminal import Progress, say
from k3ray.commands.transfer_progress import TransferProgress
from k3ray.download.answers import Transient
from k3ray.download.download import fetch_again
from k3ray.download.hub import Hub, HubRefused, Listing
from k3ray.download.known_files import read_known
from k3ray.download.patience import Patience
from k3ray.download.release import read_release
from k3ray.download.revision import DownloadFailed
from k3ray.download.verdict import FAIL, PASS, Verdict
from k3ray.download.verification import verify
from k3ray.environment import read_environment
from k3ray.workers.checkpoint.header_json import show_name
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure

LISTED = 10
_COLOURS = {PASS: "green", FAIL: "bold red"}


class VerifyFailed(Failure):
    """A checkpoint that is not whole and right."""

    exit_code = 1


class RepairRefused(Failure):
    """Nothing says where the files of this folder come from."""

    exit_code = 2


def run(directory: Path, deep: bool, repair: bool, scales: bool, endpoint: str | None, as_json: bool) -> None:
    """Prove the folder, repair it if asked to, print what was found; raises VerifyFailed when it is not right."""
    hub = choose_hub(endpoint, read_environment())
    listing = _listing(directory, hub, needed=False) if deep else None
    verdict = _prove(directory, deep, listing, scales)
    fetched = None
    if repair and verdict.fetch_again:
        _show(verdict, say_only=True)
        listing = listing or _listing(directory, hub, needed=True)
        fetched = _repair(directory, verdict, hub, listing)
        verdict = _prove(directory, deep, listing, scales)
    if as_json:
        record = {**asdict(verdict), "proven": sorted(verdict.proven), "passed": verdict.passed}
        print(json.dumps({**record, "fetch_again": verdict.fetch_again, "repaired_bytes": fetched}, indent=1))
    else:
        _show(verdict)
    conclude(verdict, directory)


def prove(directory: Path, only_tokenizer: bool, quiet: bool) -> Verdict:
    """The proof at the end of a download, of what it was asked for; shown on standard error when quiet."""
    verdict = _prove(directory, False, None, True, only_tokenizer)
    _show(verdict, say_only=quiet)
    return verdict


def _prove(directory: Path, deep: bool, listing: Listing | None, scales: bool, only_tokenizer: bool = False) -> Verdict:
    with Progress("verifying") as progress:
        return verify(directory, deep, listing, progress.update, scales, only_tokenizer)


def _listing(directory: Path, hub: Hub, needed: bool) -> Listing | None:
    """What the hub says of the folder's files: from its download's note, else asked for when it is the release."""
    known = read_known(directory)
    if known.record is not None:
        return known.record.listing
    if not known.released:
        if needed:
            raise RepairRefused(
                f"{directory}: neither a download's note nor the release's config and index say where these files "
                "come from; fetch them with k3ray download into this folder, or copy them again"
            )
        return None
    release = read_release()
    try:
        return hub.listing(release.repository, release.revision)
    except (Transient, HubRefused) as error:
        if needed and isinstance(error, Transient):
            raise DownloadFailed(f"{error}; a repair needs the hub, run the same command again") from None
        if needed:
            raise
        say(f"the checksums cannot be asked for: {error}")
        return None


def _repair(directory: Path, verdict: Verdict, hub: Hub, listing: Listing | None) -> int:
    assert listing is not None, "a repair without a listing was refused before"
    names = [name for name in verdict.fetch_again if name in listing.names]
    others = sorted(set(verdict.fetch_again) - set(names))
    if others:
        say(f"not in {listing.repository}, so not fetched: {', '.join(others)}")
    say(f"repairing from {hub.host}: {', '.join(names)}")
    with TransferProgress() as progress:
        fetched = fetch_again(directory, names, hub, listing, Patience(), say, progress.update)
    say(f"repaired: {decimal_size(fetched)} fetched")
    return fetched


def _show(verdict: Verdict, say_only: bool = False) -> None:
    """Print the table, then every problem by its file; all of it as lines about the run with say_only."""
    console = Console(file=sys.stderr if say_only else None)
    console = console if console.is_terminal else Console(file=sys.stderr if say_only else None, width=110)
    table = Table(title=f"{verdict.directory}" + (f" (part: {verdict.partial})" if verdict.partial else ""))
    for name in ("check", "result", "what was compared"):
        table.add_column(name, overflow="fold")
    for found in verdict.findings:
        colour = _COLOURS.get(found.status, "yellow")
        table.add_row(found.check, f"[{colour}]{found.status}[/]", found.detail)
    console.print(table, highlight=False)
    for found in verdict.findings:
        for problem in found.problems:
            text = f"{found.check}: {_shown(problem.file)}: {problem.text}"
            console.print(text, soft_wrap=True, highlight=False, markup=False)


def _shown(name: str) -> str:
    """A file's name; quoted where it would break the line or command the terminal."""
    return name if name.isprintable() else show_name(name)


def conclude(verdict: Verdict, directory: Path) -> None:
    """Say the verdict and what comes next; raises VerifyFailed when it is FAIL."""
    if verdict.passed:
        part = f", of the part that was asked for ({verdict.partial})" if verdict.partial else ""
        checks = sum(found.status == PASS for found in verdict.findings)
        left = [found.check for found in verdict.findings if found.status not in (PASS, FAIL)]
        unchecked = f"; not checked: {', '.join(left)}" if left else ""
        step = f"k3ray download {directory} for the rest" if verdict.partial else f"k3ray inspect {directory}"
        say(f"PASS: {counted(checks, 'check')}{part}{unchecked}; next: {step}")
        return
    failed = ", ".join(found.check for found in verdict.findings if found.status == FAIL)
    again = verdict.fetch_again
    if again:
        more = f" and {len(again) - LISTED} more" if len(again) > LISTED else ""
        step = f"fetch again: {' '.join(again[:LISTED])}{more}; next: "
        step += (
            f"k3ray verify {directory} --repair does exactly that"
            if verdict.repairable
            else f"copy them again, or k3ray download {directory}, if it is to be the released model"
        )
    else:
        step = "fetching again would not help: see the lines above"
    raise VerifyFailed(f"{directory}: FAIL in {failed}; {step}")
