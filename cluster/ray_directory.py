"""The private directory of one Ray of ours (sockets, logs, spilled objects), and the guardian that outlives us.

All the processes of that Ray carry the directory's name in their environment. Whatever ends this process, SIGKILL
included, the guardian then kills them and removes the directory. It is a shell that waits for the end of a pipe whose
other end only this process holds: under a megabyte, no polling.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from k3ray.cluster.ray_driver import RayFailure

PREFIX = "k3ray-"
RAYS = "ray"  # the part below ours that is Ray's: it opens that to every user, so ours above it stays closed
SESSION = "session"  # the name of the Ray session, and of its directory below that
VARIABLE = "K3RAY_SESSION"  # holds the directory's name
ENDING_S = 5.0  # a killed process that still lives after it hangs in a system call

# An AF_UNIX address holds 108 bytes with its final zero; this is the longest one that Ray makes below our directory.
LONGEST_ADDRESS_BYTES = 107
LONGEST_SOCKET = f"{RAYS}/{SESSION}/sockets/plasma_store"

# Reads the directory's name, then one line more: "done" when we have cleaned up ourselves, nothing when we were killed.
# A process that was just being started is found in the second round.
GUARDIAN = r"""
IFS= read -r directory || exit 0
case $directory in */k3ray-*) ;; *) exit 1 ;; esac
IFS= read -r verdict
[ "$verdict" = done ] && exit 0
for round in 1 2 3 4 5 6 7 8 9; do
    for file in $(printf 'K3RAY_SESSION=%s\n' "$directory" | grep -slF -f - /proc/[0-9]*/environ); do
        process=${file%/environ}
        kill -KILL "${process#/proc/}"
    done
    rm -rf -- "$directory"
    [ "$round" -gt 1 ] && [ ! -e "$directory" ] && exit 0
    sleep 0.5
done
"""


@contextmanager
def session_directory(roots: Sequence[Path] | None = None) -> Iterator[Path]:
    """A new directory with a short name, readable by this user only, gone at the end with the processes that carry it.

    `roots` are tried in order (by default the temporary directory, then places whose names are short). Raises
    RayFailure where none can be written to or all their names are too long for a socket.
    """
    directory = _made_below(default_roots() if roots is None else roots)
    guardian = subprocess.Popen(
        ["/bin/sh", "-c", GUARDIAN, "k3ray-guardian"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C at the terminal is not for it
    )
    assert guardian.stdin is not None
    try:
        guardian.stdin.write(os.fsencode(directory) + b"\n")
        guardian.stdin.flush()
        yield directory
    finally:
        kill_marked(f"{VARIABLE}={directory}")
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # somebody killed the guardian: nothing is left for it to do
            guardian.stdin.write(b"" if directory.exists() else b"done\n")
            guardian.stdin.close()
        guardian.wait()


def default_roots() -> list[Path]:
    """Where to look for room, best first."""
    return [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")]


def _made_below(roots: Sequence[Path]) -> Path:
    refusals = []
    for root in roots:
        length = len(os.fsencode(root / f"{PREFIX}12345678" / LONGEST_SOCKET))
        if length > LONGEST_ADDRESS_BYTES:
            refusals.append(f"{root}: its name is too long for a socket by {length - LONGEST_ADDRESS_BYTES} bytes")
            continue
        try:
            directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        except OSError as error:
            refusals.append(f"{root}: {error.strerror}")
            continue
        (directory / RAYS).mkdir()
        return directory
    raise RayFailure(
        "Ray needs a directory for its sockets and none was usable: " + "; ".join(refusals) + ". Set TMPDIR to a "
        "writable directory with a short name"
    )


def kill_marked(mark: str) -> None:
    """Kills every process of this user whose environment holds `NAME=value`, and returns when they have ended."""
    deadline = time.monotonic() + ENDING_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """The processes of this user whose environment, as it was at their start, holds `NAME=value`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found
