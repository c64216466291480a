"""How much memory this process has held at most: its proportional set size (PSS), sampled while it works.

Whoever sums over processes has pages that several share counted once.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

INTERVAL_S = 0.5
LARGEST_SHARE = 0.02  # of one core: the kernel walks all page tables for one sample
OWN = Path("/proc/self")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(process: Path) -> tuple[int, bool] | None:
    """(bytes, whether they are the PSS) of the process with this folder in /proc; None once it has ended.

    Where the system hides the PSS: what is resident and not shared, which is less.
    """
    try:
        rollup = (process / "smaps_rollup").read_text()
        kib = next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
        return int(kib) * 1024, True
    except (ProcessLookupError, StopIteration):
        return None  # ended, or a zombie: it holds no memory
    except OSError:
        pass  # another user's process, or a kernel that does not sum up
    try:
        _, resident, shared = (process / "statm").read_text().split()[:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * PAGE_BYTES, False


class OwnMemory:
    """Samples in a daemon thread from the first call of `watch` on, which ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peak = 0
        self._watching = False

    def watch(self) -> None:
        """Begin; a second call changes nothing."""
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._run, name="k3ray-memory", daemon=True).start()

    def peak_bytes(self) -> int:
        """The largest sample so far, with one taken now."""
        found = proportional_bytes(OWN)
        assert found is not None, "this process is told that it has ended"
        with self._lock:
            self._peak = max(self._peak, found[0])
            return self._peak

    def _run(self) -> None:
        while True:
            began = time.perf_counter()
            self.peak_bytes()
            time.sleep(max(INTERVAL_S, (time.perf_counter() - began) / LARGEST_SHARE))
