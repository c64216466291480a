"""Where a shard's door is, asked of its Ray actor by the stages that want to reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from k3ray.workers.hop_address import DoorAddress
from k3ray.workers.shard_link import ShardGone

LOOK_S = 0.5  # between two looks at whether an answer is still wanted


class ShardDoor:
    """Where a shard's door is, asked of its actor: Ray's call, which is authenticated, carries the secret."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __call__(self, given_up: Callable[[], bool]) -> DoorAddress:
        """Wait until the shard has loaded and answers; see HopLink."""
        ticket = self._handle.door.remote(ray.get_runtime_context().get_node_id())
        while not ray.wait([ticket], timeout=LOOK_S)[0]:
            if given_up():
                raise ShardGone("the shard was replaced")
        try:
            address: DoorAddress = ray.get(ticket)
            return address
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.ActorUnavailableError as error:
            raise ConnectionError(f"its process cannot be asked: {error}") from None
        except ray.exceptions.RayActorError as error:
            raise ShardGone(str(error)) from None
