"""Ray's ways to carry a request to another process: calls of actors, and a compiled graph of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.dag import InputNode, MultiOutputNode
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.hop_carriers import answer_of

SPARE_BYTES = 1_000_000  # of a compiled graph's memory for one message, beside the message


class Answerer:
    """Answers by a call."""

    def answer(self, message: pa.Buffer) -> pa.Buffer:
        """As many bytes as the message asks for."""
        return pa.py_buffer(answer_of(message))


def node_at(address: str) -> str:
    """The id of the node with an address."""
    return str(next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == address))


def answerers(count: int, node: str | None) -> list[Any]:
    """Actors on a node, or wherever Ray puts them; each has answered once."""
    options: dict[str, Any] = {"num_cpus": 0}
    if node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    actors = [ray.remote(Answerer).options(**options).remote() for _ in range(count)]
    ray.get([actor.answer.remote(pa.py_buffer(bytes(8))) for actor in actors])
    return actors


class RayCalls:
    """Plain calls of actors."""

    def __init__(self, count: int, node: str | None) -> None:
        self._actors = answerers(count, node)

    def exchange(self, messages: Sequence[bytes]) -> int:
        """See Carrier."""
        refs = [
            actor.answer.remote(pa.py_buffer(message))
            for actor, message in zip(self._actors, messages, strict=False)
        ]  # fmt: skip
        return sum(int(answer.size) for answer in ray.get(refs))


class RayGraph:
    """A compiled graph, made anew when other sizes are asked for: it keeps memory for the largest message."""

    def __init__(self, count: int, node: str | None) -> None:
        self._actors = answerers(count, node)
        self._graph: Any = None
        self._sizes: tuple[int, ...] = ()

    def exchange(self, messages: Sequence[bytes]) -> int:
        """See Carrier."""
        sizes = (*map(len, messages), len(answer_of(messages[0])))
        if sizes != self._sizes:
            self._compile(len(messages), max(sum(sizes[:-1]), sizes[-1]) + SPARE_BYTES)
            self._sizes = sizes
        found = self._graph.execute(*(pa.py_buffer(message) for message in messages))
        return sum(int(answer.size) for answer in ray.get(found))

    def _compile(self, fan: int, message_bytes: int) -> None:
        self.close()
        with InputNode() as asked:
            nodes = [actor.answer.bind(asked[place]) for place, actor in enumerate(self._actors[:fan])]
            graph = MultiOutputNode(nodes)
        self._graph = graph.experimental_compile(_buffer_size_bytes=message_bytes)

    def close(self) -> None:
        """End the graph's loops in the actors."""
        if self._graph is not None:
            self._graph.teardown()
