"""What a seat needs for a run of layers, and what of them it leaves to be read: exact, and quick enough to try all.

The same arithmetic as the budget of one host (budget.py, trunk_dial.py), for a run of layers anywhere in a model.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from k3ray.cluster import memory_parts
from k3ray.cluster.budget_plan import COPY, PINNED, RING
from k3ray.cluster.seats import Seat
from k3ray.workers.frames import STEP_TOKENS
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.layout import TapeLayout
from k3ray.workers.tape.order import KV_B
from k3ray.workers.tape.residency import DEFAULT_RING_CHUNKS, pinning_order

Parts = dict[str, int]
Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Dial:
    """Of one run of layers, by how many chunks are pinned: (chunks + 1,) all that is mapped, and what stays."""

    run: tuple[int, int]
    memory_bytes: Whole
    pinned_bytes: Whole


@dataclass(slots=True)
class LayerCosts:
    """The model's costs by runs of layers [first, stop), for one number of positions. Made once, asked often."""

    config: ModelConfig
    layout: TapeLayout
    positions: int
    _ends: list[int] = field(init=False)  # (chunks + 1,) bytes of the tape before each chunk
    _begins: list[int] = field(init=False)  # (layers + 2,) the first chunk of each layer, the head's, and all
    _sizes: Whole = field(init=False)  # (chunks,) bytes
    _kv_b_chunks: Whole = field(init=False)
    _apart_layers: frozenset[int] = field(init=False)
    _small: list[int] = field(init=False)
    _state: list[int] = field(init=False)
    _kv_b_bytes: int = field(init=False)
    _index: int = field(init=False)
    _orders: dict[int, Whole] = field(init=False, default_factory=dict)
    _kept: _Dial | None = field(init=False, default=None)
    _working: dict[tuple[int, bool], Parts] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        config, layout = self.config, self.layout
        num_layers = config.num_hidden_layers
        self._ends = list(accumulate((chunk.nbytes for chunk in layout.chunks), initial=0))
        layers = [chunk.layer for chunk in layout.chunks]
        self._begins = [bisect_right(layers, layer - 1) for layer in range(num_layers + 2)]
        self._sizes = np.array([chunk.nbytes for chunk in layout.chunks])
        chunks, self._apart_layers = _find_kv_b(layout)
        self._kv_b_chunks = np.array(chunks, dtype=np.int64)
        singles = [range(layer, layer + 1) for layer in range(num_layers)]
        self._small = list(accumulate((memory_parts.small_tensor_bytes(config, one) for one in singles), initial=0))
        state = (memory_parts.state_bytes(config, one, self.positions) for one in singles)
        self._state = list(accumulate(state, initial=0))
        self._kv_b_bytes = max((tensor.nbytes for tensor in layout.tensors if tensor.short == KV_B), default=0)
        self._index = memory_parts.index_bytes(config)

    @property
    def step_tokens(self) -> int:
        """The most tokens of one step."""
        return min(STEP_TOKENS, self.positions)

    def trunk_bytes(self, first: int, stop: int) -> int:
        """Bytes of the tape of these layers, with the head where they are the last."""
        low, high = self._chunks(first, stop)
        return self._ends[high] - self._ends[low]

    def state_bytes(self, first: int, stop: int) -> int:
        """What these layers remember of the sequence."""
        return self._state[stop] - self._state[first]

    def node_parts(self, seat: Seat) -> Parts:
        """What a seat pays for its node: what is there once, and the driver on its node."""
        once = self.once_parts() if seat.opens_node else {}
        return once | (self.driver_parts() if seat.carries_driver else {})

    def once_parts(self) -> Parts:
        """What every node has once."""
        return {"libraries, once": memory_parts.LIBRARY_BYTES, "Ray's daemons": memory_parts.RAY_BYTES,
                "index of the tensors": self._index}  # fmt: skip

    def driver_parts(self) -> Parts:
        """What the driver takes on its node."""
        vocabulary = (memory_parts.VOCABULARY_BYTES + 16) * self.config.vocab_size
        return {"driver": memory_parts.DRIVER_BYTES + vocabulary}

    def stage_parts(self, first: int, stop: int, threads: int, remote_experts: bool, alone: bool) -> Parts:
        """What a stage needs whatever its budget. alone: it has all layers.

        One of several gets the arrays and messages that any of them could need, so that how the layers are cut does
        not change what the cluster has room for.
        """
        key = (2 * threads + remote_experts, alone)
        if key not in self._working:
            self._working[key] = self._working_parts(threads, remote_experts, alone)
        return {
            "process": memory_parts.ACTOR_BYTES,
            "small tensors": self._small[stop] - self._small[first],
            "state and latents": self.state_bytes(first, stop),
            **self._working[key],
        }

    def _working_parts(self, threads: int, remote_experts: bool, alone: bool) -> Parts:
        config, tokens, layers = self.config, self.step_tokens, self.config.num_hidden_layers
        runs = [range(layers)] if alone or layers == 1 else [range(layers), range(layers - 1)]
        working = (memory_parts.stage_working_bytes(config, run, tokens, self.positions, threads) for run in runs)
        # one stage sends nothing; else the frames in and out, the answer and what goes to the shards
        cuts = (0, layers) if alone else (0, layers, layers)
        messages = memory_parts.message_bytes(config, cuts, tokens, remote_experts)
        return {"activations": max(working), "messages under way": messages}

    def shard_parts(self) -> Parts:
        """What a shard needs beside its slots."""
        working = memory_parts.shard_working_bytes(self.config, self.step_tokens)
        return {"process": memory_parts.ACTOR_BYTES, "activations": working}

    def all_chunks(self, first: int, stop: int) -> int:
        """How many chunks of the tape these layers have."""
        low, high = self._chunks(first, stop)
        return high - low

    def pinned_chunks(self, first: int, stop: int, room_bytes: int) -> int | None:
        """The most chunks that can stay in memory with a ring for the others in so much room; None: not even none."""
        low, high = self._chunks(first, stop)
        if self.trunk_bytes(first, stop) + self._apart(first, stop) <= room_bytes:
            return high - low
        fitting = np.flatnonzero(self._dial(first, stop).memory_bytes <= room_bytes)
        return int(fitting[-1]) if len(fitting) else None

    def trunk_memory(self, first: int, stop: int, pinned: int) -> int:
        """Bytes that are mapped for the trunk with so many chunks pinned."""
        low, high = self._chunks(first, stop)
        if pinned == high - low:
            return self.trunk_bytes(first, stop) + self._apart(first, stop)
        return int(self._dial(first, stop).memory_bytes[pinned])

    def trunk_parts(self, first: int, stop: int, pinned: int) -> Parts:
        """The same by what it is for."""
        held = self.trunk_bytes(first, stop) - self.streamed_bytes(first, stop, pinned)
        ring = self.ring_chunks(first, stop, pinned) * self.layout.chunk_bytes
        parts = {PINNED: held, RING: ring, COPY: self.trunk_memory(first, stop, pinned) - held - ring}
        return {name: nbytes for name, nbytes in parts.items() if nbytes}

    def ring_chunks(self, first: int, stop: int, pinned: int) -> int:
        """The buffers through which the others pass."""
        low, high = self._chunks(first, stop)
        return min(DEFAULT_RING_CHUNKS, high - low - pinned)

    def streamed_bytes(self, first: int, stop: int, pinned: int) -> int:
        """What a step reads of the tape."""
        low, high = self._chunks(first, stop)
        if pinned == high - low:
            return 0
        return self.trunk_bytes(first, stop) - int(self._dial(first, stop).pinned_bytes[pinned])

    def _chunks(self, first: int, stop: int) -> tuple[int, int]:
        """The first chunk of the layers, with the head where they are the last, and the one after their last."""
        head = stop == self.config.num_hidden_layers
        return self._begins[first], self._begins[stop + head]

    def _apart(self, first: int, stop: int) -> int:
        """Bytes of a matrix that has to be copied into one piece even when all is pinned."""
        return self._kv_b_bytes if any(first <= layer < stop for layer in self._apart_layers) else 0

    def _dial(self, first: int, stop: int) -> _Dial:
        """As trunk_dial.py has it; the last one is kept."""
        if self._kept is None or self._kept.run != (first, stop):
            self._kept = self._make_dial(first, stop)
        return self._kept

    def _make_dial(self, first: int, stop: int) -> _Dial:
        low, high = self._chunks(first, stop)
        count = high - low
        bits = max(1, (count - 1).bit_length())
        if bits not in self._orders:
            self._orders[bits] = np.array(pinning_order(1 << bits))
        order = self._orders[bits]
        order = order[order < count]  # pinning_order(count): the same bits read backwards
        pinned = np.concatenate([[0], np.cumsum(self._sizes[low:high][order])])
        memory = pinned + np.minimum(DEFAULT_RING_CHUNKS, count - np.arange(count + 1)) * self.layout.chunk_bytes
        places = self._kv_b_chunks[(self._kv_b_chunks >= low) & (self._kv_b_chunks < high)] - low
        last = int(np.argsort(order)[places].max()) if len(places) else -1  # of the kv_b pieces in the order of pinning
        copied = np.where(np.arange(count + 1) <= last, self._kv_b_bytes, self._apart(first, stop))
        return _Dial((first, stop), memory + copied, pinned)


def _find_kv_b(layout: TapeLayout) -> tuple[list[int], frozenset[int]]:
    """(the chunks with rows of a kv_b, the layers where these do not adjoin on the tape)."""
    chunks, apart = [], set()
    ends: dict[int, int] = {}
    for number, chunk in enumerate(layout.chunks):
        for segment in chunk.segments:
            tensor = layout.tensors[segment.tensor]
            if tensor.short == KV_B:
                begin = chunk.offset + segment.offset
                chunks.append(number)
                if ends.get(segment.tensor, begin) != begin:
                    apart.add(chunk.layer)
                ends[segment.tensor] = begin + segment.rows * tensor.row_bytes
    return chunks, frozenset(apart)
