"""A link to a shard that outlives the shard's process: what was asked of a lost one is asked of its replacement.

It does not decide that a shard is lost for good, and replaces nothing: the driver does, and says so through `replace`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from k3ray.workers.expert_fanout import ShardLink
from k3ray.workers.failure import Failure


class ShardGone(Failure):
    """A shard's process ended while it was asked."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way. generation: of the shard it was sent to."""

    request: pa.Buffer
    ticket: Any
    generation: int


class ReplaceableShard:
    """A ShardLink whose far end may be replaced, by another thread, while an answer is awaited.

    A shard keeps no state, so asking again cannot change a bit. A wait for a replacement has no end of its own: the
    driver replaces the shard or ends this process.
    """

    def __init__(self, link: ShardLink) -> None:
        self._link = link
        self._generation = 0
        self._replaced = threading.Condition()

    def submit(self, request: pa.Buffer) -> Asked:
        """Send a request without waiting."""
        with self._replaced:
            link, generation = self._link, self._generation
        return Asked(request, link.submit(request), generation)

    def collect(self, ticket: Asked) -> pa.Buffer:
        """Wait for the reply, asking again whenever the shard was lost and replaced."""
        while True:
            with self._replaced:
                link, generation = self._link, self._generation
            if generation != ticket.generation:
                ticket = self.submit(ticket.request)
                continue
            try:
                return link.collect(ticket.ticket)
            except ShardGone:
                self._await_replacement(generation)

    @property
    def link(self) -> ShardLink:
        """What is asked at present; any thread may look."""
        with self._replaced:
            return self._link

    def replace(self, link: ShardLink, generation: int) -> ShardLink:
        """Ask `link` from now on; an older generation than the present one changes nothing.

        Returns the link that is not used any more: whoever still waits on it has to be woken.
        """
        with self._replaced:
            if generation <= self._generation:
                return link
            unused, self._link, self._generation = self._link, link, generation
            self._replaced.notify_all()
            return unused

    def _await_replacement(self, lost: int) -> None:
        with self._replaced:
            self._replaced.wait_for(lambda: self._generation != lost)
