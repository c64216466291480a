"""Which commit a folder's download is of, and the hub's listing of it: noted once, and kept to ever after."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from k3ray.download.answers import Transient
from k3ray.download.checksums import hash_file
from k3ray.download.file_fetch import wait
from k3ray.download.hub import COMMIT, Hub, HubFile, HubRefused, Listing
from k3ray.download.patience import Patience
from k3ray.download.record import Record, RecordError, new_record, read_record
from k3ray.download.release import read_release
from k3ray.download.stream import Line
from k3ray.download.workplace import Workplace
from k3ray.workers.failure import Failure

Say = Callable[[str], None]
Answer = TypeVar("Answer")


class DownloadFailed(Failure):
    """Some files, or the hub's metadata, could not be fetched; what is here is kept."""


def find_record(
    repository: str | None,
    revision: str | None,
    own: Iterable[str],
    workplace: Workplace,
    line: Line,
    patience: Patience,
    say: Say,
) -> Record:
    """The folder's record, or a new one from the hub; raises RecordError rather than mix two revisions.

    Without a repository and a revision: what the folder has already, else the release and its pinned commit. own: files
    that tell, in a folder without a record, whether it holds another model.
    """
    release = read_release()
    record = read_record(workplace.directory)
    repository = repository or (record.repository if record is not None else release.repository)
    if revision is None and record is not None:
        revision = record.commit
    if revision is None and repository != release.repository:
        raise HubRefused(f"--repo {repository}: name its --revision, a commit of 40 digits")
    revision = revision or release.revision
    if record is not None and record.repository != repository:
        raise RecordError(
            f"{workplace.directory}: holds a download of {record.repository}, asked for {repository}; "
            "name another folder"
        )
    if record is not None and revision == record.commit:
        return record
    listing = patiently(line, patience, say, partial(line.hub.listing, repository, revision))
    if not COMMIT.fullmatch(revision):
        say(f"revision {revision} of {repository} is commit {listing.commit} now, and this folder keeps to it")
    if record is not None and listing.commit != record.commit:
        raise RecordError(
            f"{workplace.directory}: holds commit {record.commit}, asked for {listing.commit}; name another folder, "
            f"or go on with --revision {record.commit}"
        )
    if record is None:
        _check_foreign(workplace, listing, own)
    check_published(repository, listing.commit, listing.files, line.hub)
    return record or new_record(listing)


def patiently(line: Line, patience: Patience, say: Say, question: Callable[[], Answer]) -> Answer:
    """Ask until there is an answer; raises DownloadFailed when there is none for long."""
    chance = random.Random()
    for failures in range(1, patience.attempts + 1):
        try:
            return question()
        except Transient as error:
            if failures == patience.attempts:
                raise DownloadFailed(
                    f"no metadata after {failures} attempts, the last: {error}; check the network and --endpoint, and "
                    "run the same command again"
                ) from None
            seconds = patience.wait_s(failures, error.retry_after_s, chance)
            say(f"{error}; asking again in {seconds:.1f} s")
            wait(line, seconds)
    raise AssertionError("attempts is at least 1")


def _check_foreign(workplace: Workplace, listing: Listing, own: Iterable[str]) -> None:
    """Refuse a folder with another model in it: its files would be replaced."""
    for name in own:
        path, file = workplace.final(name), listing.files.get(name)
        if file is not None and path.is_file() and hash_file(path, file.checksum) != file.checksum.value:
            raise RecordError(
                f"{path}: is not the {name} of {listing.repository} at {listing.commit}: this folder holds another "
                "model or revision; name another folder, or remove this file if what is beside it is to be replaced"
            )


def check_published(repository: str, commit: str, files: dict[str, HubFile], hub: Hub) -> None:
    """Refuse a mirror whose shards have other sizes than those published for the pinned revision."""
    release = read_release()
    if (repository, commit) != (release.repository, release.revision):
        return
    for name, file in files.items():
        size = release.sizes.get(name, file.size)
        if file.size != size:
            raise HubRefused(
                f"{hub.host}: offers {name} with {file.size} bytes, published are {size}; use another --endpoint"
            )
