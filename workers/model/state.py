"""What a slice remembers of each sequence: KDA matrices, convolution tails, MLA latents, and the next position."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig

Float32Array = npt.NDArray[np.float32]


class SequenceFailure(Failure):
    """A sequence that is unknown, full, damaged, or asked for at a position that it is not at."""


@dataclass(frozen=True, slots=True)
class KdaState:
    """matrices: (heads, d, d) f32: head, key channel, value channel. tail_*: (kernel - 1, channels), oldest first."""

    matrices: Float32Array
    tail_q: Float32Array
    tail_k: Float32Array
    tail_v: Float32Array


@dataclass(frozen=True, slots=True)
class MlaState:
    """cache: (capacity, kv_lora + rope) f32: a position's normalised latent, then its unrotated channels."""

    cache: Float32Array


@dataclass(slots=True)
class SequenceState:
    """One sequence in one slice. position: the one expected next. broken: why it cannot go on, or empty."""

    capacity: int
    layers: dict[int, KdaState | MlaState]
    position: int = 0
    broken: str = field(default="")

    def expect(self, session: int, first: int, count: int) -> None:
        """Refuse a step that does not begin at the expected position, does not fit, or follows a failed one."""
        if self.broken:
            raise SequenceFailure(f"session {session} stopped at position {self.position}: {self.broken}")
        if first != self.position:
            raise SequenceFailure(
                f"session {session}: a step for position {first} arrived where position {self.position} is expected; "
                "applying it would change the state twice or leave a gap"
            )
        if first + count > self.capacity:
            raise SequenceFailure(
                f"session {session}: position {first + count - 1} does not fit in the {self.capacity} positions "
                "that the session was opened for; open it with a larger capacity"
            )


def new_sequence(config: ModelConfig, layers: range, capacity: int) -> SequenceState:
    """Return the state of an empty sequence: histories start at zero."""
    heads, width = config.kda_num_heads, config.kda_head_dim
    tail = (config.conv_kernel_size - 1, heads * width)
    cache = (capacity, config.kv_lora_rank + config.qk_rope_head_dim)
    states: dict[int, KdaState | MlaState] = {}
    for layer in layers:
        if config.is_mla(layer):
            states[layer] = MlaState(np.zeros(cache, np.float32))
        else:
            matrices = np.zeros((heads, width, width), np.float32)
            states[layer] = KdaState(matrices, *(np.zeros(tail, np.float32) for _ in range(3)))
    return SequenceState(capacity, states)
