"""What a hub says about a repository at one commit, through huggingface_hub: names, sizes, checksums, addresses.

Knows who may be given the token: the endpoint that the user named, and nobody else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from k3ray.download.answers import Transient
from k3ray.download.checksums import Checksum
from k3ray.download.patience import parse_retry_after
from k3ray.environment import EnvironmentFailure, is_hub_address
from k3ray.http_client import is_private
from k3ray.workers.failure import Failure

try:  # the library reads its own variables when it is imported
    from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
except ValueError as error:
    raise EnvironmentFailure(
        f"huggingface_hub does not understand the environment ({error}); correct or unset HF_HUB_ETAG_TIMEOUT and "
        "HF_HUB_DOWNLOAD_TIMEOUT, which take whole seconds"
    ) from None

DEFAULT_ENDPOINT = "https://huggingface.co"
COMMIT = re.compile(r"[0-9a-f]{40}")
METADATA_TIMEOUT_S = 30.0

Answer = TypeVar("Answer")


class HubRefused(Failure):
    """The hub's answer cannot be worked with; trying again is no use."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository at a commit."""

    name: str
    size: int
    checksum: Checksum


@dataclass(frozen=True, slots=True)
class Listing:
    """The files at the top of a repository at a commit. unproven: names whose size or checksum is not known yet."""

    repository: str
    commit: str
    files: dict[str, HubFile]
    unproven: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Every name at the top of the repository."""
        return sorted({*self.files, *self.unproven})


@dataclass(frozen=True, slots=True)
class Hub:
    """An endpoint and what is sent to it. said_by: who named the endpoint. token: never shown."""

    endpoint: str = DEFAULT_ENDPOINT
    said_by: str = "the default"
    token: str | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        """The endpoint's host, to be shown."""
        return urlsplit(self.endpoint).netloc

    @property
    def sends_token(self) -> bool:
        """Whether the token is sent: not over an unencrypted line to another machine."""
        return self.token is not None and is_private(self.endpoint)

    def headers_for(self, url: str) -> dict[str, str]:
        """The headers of a request: with the token to the endpoint itself, without it anywhere else."""
        mine = _origin(url) == _origin(self.endpoint)
        token = self.token if mine and self.sends_token else None
        _ask_nobody_else()
        headers = build_hf_headers(token=token or False, library_name="k3ray")
        return {**headers, "accept-encoding": "identity"}

    def url(self, repository: str, commit: str, name: str) -> str:
        """The address of a file."""
        return hf_hub_url(repository, name, revision=commit, endpoint=self.endpoint)

    def listing(self, repository: str, revision: str) -> Listing:
        """The repository's files at a commit or at what a branch or tag points to now. Raises HubRefused, Transient."""
        api = HfApi(endpoint=self.endpoint, token=self.token if self.sends_token else False)
        info = self._ask(
            f"{repository} at {revision}",
            lambda: api.model_info(repository, revision=revision, files_metadata=True, timeout=METADATA_TIMEOUT_S),
        )
        commit = info.sha or ""
        if not COMMIT.fullmatch(commit):
            raise HubRefused(f"{self.host}: found {commit[:60]!r} as {repository}'s commit, expected 40 digits")
        if COMMIT.fullmatch(revision) and commit != revision:
            raise HubRefused(f"{self.host}: answered with commit {commit}, expected {revision}; use another --endpoint")
        files, unproven = {}, set()
        for sibling in info.siblings or ():
            name, size = sibling.rfilename, sibling.size
            if not _is_plain(name):
                continue
            text = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
            checksum = Checksum.from_text(text or "")
            if type(size) is int and size >= 0 and checksum is not None:
                files[name] = HubFile(name, size, checksum)
            else:
                unproven.add(name)
        return Listing(repository, commit, files, frozenset(unproven))

    def file(self, listing: Listing, name: str) -> HubFile:
        """A file whose size or checksum the listing leaves out, asked for by itself. Raises HubRefused, Transient."""
        url = self.url(listing.repository, listing.commit, name)
        token = self.token if self.sends_token else False
        found = self._ask(
            name, lambda: get_hf_file_metadata(url, token=token, timeout=METADATA_TIMEOUT_S, endpoint=self.endpoint)
        )
        checksum = Checksum.from_text(found.etag or "")
        if found.size is None or checksum is None or found.commit_hash not in (None, listing.commit):
            raise HubRefused(
                f"{self.host}: {name}: found size {found.size}, etag {str(found.etag)[:70]!r} and commit "
                f"{found.commit_hash}, expected a size, a checksum and {listing.commit}; use another --endpoint"
            )
        return HubFile(name, found.size, checksum)

    def _ask(self, what: str, question: Callable[[], Answer]) -> Answer:
        """Ask the library; its errors become ours, which never hold a request or its headers."""
        _ask_nobody_else()
        try:
            return question()
        except GatedRepoError:
            raise HubRefused(f"{what}: {self.host} asks for access: accept its terms there and set HF_TOKEN") from None
        except RevisionNotFoundError:
            raise HubRefused(f"{what}: {self.host} has no such revision; correct --revision") from None
        except RepositoryNotFoundError as error:
            raise HubRefused(f"{what}: {self.host} answered {error.response.status_code}: no such repository, or "
                             "not for this user; check --repo and HF_TOKEN") from None  # fmt: skip
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (408, 425, 429) or status >= 500:
                asked = parse_retry_after(error.response.headers.get("retry-after"))
                raise Transient(f"{self.host} answered {status}", asked) from None
            raise HubRefused(f"{what}: {self.host} answered {status}; check HF_TOKEN, --repo and --endpoint") from None
        except OfflineModeIsEnabled:
            raise HubRefused(f"{what}: HF_HUB_OFFLINE is set; unset it to reach {self.host}") from None
        except HFValidationError as error:
            raise HubRefused(f"--repo: {error}") from None
        except httpx.HTTPError as error:
            raise Transient(f"{self.host}: {type(error).__name__}: {error}") from None
        except OSError as error:  # certificates that are not there
            raise HubRefused(f"{what}: {self.host} cannot be connected to ({type(error).__name__}: {error.strerror}); "
                             "correct SSL_CERT_FILE and the proxies of the environment") from None  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # a page that is not the hub's JSON
            raise HubRefused(f"{what}: {self.host} answered with something else than a hub's metadata "
                             f"({type(error).__name__}); correct --endpoint") from None  # fmt: skip


def _ask_nobody_else() -> None:
    """Keep the library from asking huggingface.co, whatever the endpoint, what its telemetry should name."""
    constants.HF_HUB_DISABLE_TELEMETRY = True


def check_endpoint(text: str, said_by: str) -> str:
    """The endpoint without a trailing slash; raises HubRefused when it is no address of a hub."""
    if not is_hub_address(text):
        raise HubRefused(f"{said_by}: expected an address like {DEFAULT_ENDPOINT}, with no user, ? or #")
    return text.rstrip("/")


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _is_plain(name: object) -> bool:
    """Whether a name is of a file at the top of the repository that may be made in a folder."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}", name) is not None
