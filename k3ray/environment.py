"""The one file that reads the environment; an unknown or malformed value is an error, never a default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from k3ray.workers.failure import Failure


class EnvironmentFailure(Failure):
    """A variable whose value is not understood."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says. model_dir: K3_MODEL_DIR. tokenizer: K3_TOK_FILES. threads: OMP_NUM_THREADS.

    ray_address: RAY_ADDRESS. hf_token: HF_TOKEN, which no text shows. hf_endpoint: HF_ENDPOINT, a hub's or mirror's
    address. ports: K3RAY_PORTS, the first and the last port at which shards may listen for stages of other hosts.
    state_home: XDG_STATE_HOME, where what a user may want back is kept. None where a variable is unset or empty.
    """

    model_dir: Path | None
    tokenizer: Path | None
    threads: int | None
    ray_address: str | None
    hf_token: str | None = field(default=None, repr=False)
    hf_endpoint: str | None = None
    ports: tuple[int, int] | None = None
    state_home: Path | None = None

    @property
    def rescue_folder(self) -> Path:
        """Where the sequences of runs are kept that could not go on."""
        return (self.state_home or Path.home() / ".local" / "state") / "k3ray"


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables (those of the process by default); EnvironmentFailure names the one that is malformed."""
    found = os.environ if variables is None else variables
    return Environment(
        model_dir=_path(found, "K3_MODEL_DIR"),
        tokenizer=_path(found, "K3_TOK_FILES"),
        threads=_threads(found),
        ray_address=found.get("RAY_ADDRESS") or None,
        hf_token=_token(found),
        hf_endpoint=_endpoint(found),
        ports=_ports(found),
        state_home=_folder_to_be(found, "XDG_STATE_HOME"),
    )


def _path(variables: Mapping[str, str], name: str) -> Path | None:
    text = variables.get(name)
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.exists():
        raise EnvironmentFailure(f"{name}={text}: there is no such file or folder; correct it or unset it")
    return path


def _folder_to_be(variables: Mapping[str, str], name: str) -> Path | None:
    """A folder that need not exist yet."""
    text = variables.get(name)
    if text and not Path(text).is_absolute():
        raise EnvironmentFailure(f"{name}={text}: expected a path that begins with /; correct it or unset it")
    return Path(text) if text else None


def _threads(variables: Mapping[str, str]) -> int | None:
    text = variables.get("OMP_NUM_THREADS")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise EnvironmentFailure(f"OMP_NUM_THREADS={text}: expected a number from 1 to 4096; correct or unset it")
    return int(text)


def _ports(variables: Mapping[str, str]) -> tuple[int, int] | None:
    text = variables.get("K3RAY_PORTS")
    if not text:
        return None
    first, dash, last = text.partition("-")
    words = (first, last if dash else first)
    if not all(word.isascii() and word.isdecimal() and len(word) <= 5 for word in words):
        raise EnvironmentFailure(f"K3RAY_PORTS={text}: expected two ports like 20000-20099; correct or unset it")
    low, high = int(words[0]), int(words[1])
    if not 1024 <= low <= high <= 65_535:
        raise EnvironmentFailure(f"K3RAY_PORTS={text}: expected ports from 1024 to 65535, the lower one first")
    return low, high


def _token(variables: Mapping[str, str]) -> str | None:
    text = (variables.get("HF_TOKEN") or "").strip()
    if not all("!" <= character <= "~" for character in text):
        raise EnvironmentFailure("HF_TOKEN: found something that is no token (not shown); correct it or unset it")
    return text or None


def _endpoint(variables: Mapping[str, str]) -> str | None:
    text = variables.get("HF_ENDPOINT")
    if not text:
        return None
    if not is_hub_address(text):
        expected = "expected a hub's address like https://huggingface.co, with no user, ? or #"
        raise EnvironmentFailure(f"HF_ENDPOINT: {expected}; correct it or unset it")
    return text.rstrip("/")


def is_hub_address(text: str) -> bool:
    """Whether a text is a hub's address, like https://huggingface.co: a host that can be one, no user, query or #."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    named = all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")) or ":" in host
    plain = all("!" <= character <= "~" for character in text) and not set(text) & set("?#\\\"'<>@")
    return parts.scheme in ("http", "https") and named and port != 0 and plain
