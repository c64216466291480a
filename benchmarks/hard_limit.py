"""A cgroup with a memory limit around one command: what goes above it is killed by the kernel, not by us.

Both versions are known: a group below a directory of the version 1 memory hierarchy, or of version 2. The directory is
the user's to give (a delegated one, or any for root): nothing is made in a group that somebody else manages.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ENTER = 'echo $$ > "$0" && exec "$@"'  # the command's own process enters, so that all its children are born inside


@dataclass(frozen=True, slots=True)
class LimitedGroup:
    """A group that exists while its context does."""

    path: Path
    events: Path

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command, to be run inside."""
        return ["/bin/sh", "-c", ENTER, str(self.path / "cgroup.procs"), *command]

    def kills(self) -> int:
        """How many processes the kernel has ended for want of memory."""
        rows = (line.split() for line in self.events.read_text().splitlines())
        return next((int(row[1]) for row in rows if row[0] == "oom_kill"), 0)


@contextmanager
def limited_group(below: Path, limit_bytes: int) -> Iterator[LimitedGroup]:
    """Make a group below a cgroup directory with the limit, without swap; exits with a message where that fails."""
    group = below / f"k3ray-ladder-{os.getpid()}"
    try:
        if (below / "cgroup.controllers").exists():
            with suppress(OSError):  # already so, or refused: then the limit's file is missing below
                (below / "cgroup.subtree_control").write_text("+memory")
            group.mkdir()
            (group / "memory.max").write_text(str(limit_bytes))
            with suppress(OSError):  # a kernel without swap
                (group / "memory.swap.max").write_text("0")
            limited = LimitedGroup(group, group / "memory.events")
        else:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            with suppress(OSError):  # a kernel without accounting of swap
                (group / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
            limited = LimitedGroup(group, group / "memory.oom_control")
        limited.kills()
    except OSError as error:
        _remove(group)
        sys.exit(f"--cgroup {below}: no group with a memory limit can be made there ({error})")
    try:
        yield limited
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove the group once its last process has ended; it has no files to be removed."""
    for _ in range(50):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
    if group.exists():
        print(f"{group}: still holds processes, remove it with rmdir when they have ended", file=sys.stderr)
