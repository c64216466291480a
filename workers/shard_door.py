"""Where a shard's door is, asked of its Ray actor by the stages that want to reach it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from k3ray.workers.hop_address import DoorAddress
from k3ray.workers.shard_link import ShardGone

LOOK_S = 0.5  # between two looks at whether an answer is still wanted
ANSWER_S = 5.0  # after which a shard that has not answered counts as not reached in this attempt


class ShardDoor:
    """Where a shard's door is, asked of its actor: Ray's call, which is authenticated, carries the secret."""

    def __init__(self, handle: Any, group: str, answer_s: float = ANSWER_S) -> None:
        """group: the concurrency group in which the actor answers whatever it is at work on."""
        self._handle = handle
        self._group = group
        self._answer_s = answer_s
        self._asked: Any = None  # a question on its way is not asked again: its answer comes when the link is mended

    def __call__(self, given_up: Callable[[], bool]) -> DoorAddress:
        """Wait until the shard has loaded and answers; see HopLink. ConnectionError where it is not reached."""
        while True:
            address = self._answer(given_up)
            if address is not None:
                return address
            time.sleep(LOOK_S)  # it loads still

    def _answer(self, given_up: Callable[[], bool]) -> DoorAddress | None:
        if self._asked is None:
            node = ray.get_runtime_context().get_node_id()
            self._asked = self._handle.door.options(concurrency_group=self._group).remote(node)
        until = time.monotonic() + self._answer_s
        while not ray.wait([self._asked], timeout=min(LOOK_S, self._answer_s))[0]:
            if given_up():
                raise ShardGone("the shard was replaced")
            if time.monotonic() > until:
                raise ConnectionError(f"its process has not answered for {self._answer_s:.0f} s where that is")
        asked, self._asked = self._asked, None
        try:
            address: DoorAddress | None = ray.get(asked)
            return address
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.ActorUnavailableError as error:
            raise ConnectionError(f"its process cannot be asked: {error}") from None
        except ray.exceptions.RayActorError as error:
            raise ShardGone(str(error)) from None
