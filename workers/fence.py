"""The end of a process that its run has given up: one whose node was cut off, replaced elsewhere, and is back.

Ray does not end it: the word that it is to end was lost with the link. So it asks now and then itself, and ends too
when the node's own Ray process has ended. It is replaced already, and nobody waits for its answers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

LOOK_S = 5.0


class Fence:
    """Watches in a thread of its own, from `begin` on."""

    def __init__(
        self,
        is_outlawed: Callable[[], bool],
        parent: Callable[[], int] = os.getppid,
        end: Callable[[int], None] = os._exit,  # nothing of it may go on, least of all an orderly farewell
        look_s: float = LOOK_S,
    ) -> None:
        """is_outlawed: whether the run has given this process up; an error in it counts as no answer."""
        self._is_outlawed = is_outlawed
        self._parent = parent
        self._end = end
        self._look_s = look_s
        self._first_parent = parent()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Watch from now on; a second time changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="k3ray-fence", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._look_s):
            if self._parent() != self._first_parent or self._asked():
                self._end(1)
                return

    def _asked(self) -> bool:
        try:
            return self._is_outlawed()
        except Exception:  # noqa: BLE001 - the head cannot be asked just now, for whatever reason: go on
            return False
