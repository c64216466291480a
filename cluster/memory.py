"""What a plan needs of this host's memory, as arithmetic on the config, and the refusal when it cannot hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from k3ray.cluster.plan import Plan
from k3ray.workers.checkpoint.shapes import TensorType, expert_tensors, layer_tensors, top_tensors
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig

BYTES_OF = {"BF16": 2, "F32": 4, "U8": 1}
RAY_BYTES = 400_000_000  # its daemons, measured on a small machine
PROCESS_BYTES = 200_000_000  # one actor's interpreter, libraries and compiled kernels


class MemoryFailure(Failure):
    """A plan that does not fit into this host's memory."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes by part. trunk: layers without routed experts, and the head. state: of one sequence of the asked length."""

    trunk: int
    experts: int
    state: int
    processes: int

    @property
    def total(self) -> int:
        """Everything together."""
        return self.trunk + self.experts + self.state + self.processes


def memory_need(config: ModelConfig, plan: Plan, positions: int) -> MemoryNeed:
    """Return what all processes of the plan need when everything is resident, with one sequence of `positions`."""
    layers = range(config.num_hidden_layers)
    top = {name: tensor for name, tensor in top_tensors(config).items() if name != "embed_tokens.weight"}
    trunk = _bytes(top) + sum(_bytes(layer_tensors(config, layer)) for layer in layers)
    experts = _bytes(expert_tensors(config)) * config.num_experts * len(config.moe_layers)
    state = sum(state_bytes(config, layer, positions) for layer in layers)
    return MemoryNeed(trunk, experts, state, RAY_BYTES + PROCESS_BYTES * (plan.num_processes + 1))


def state_bytes(config: ModelConfig, layer: int, positions: int) -> int:
    """Return the bytes of one sequence's state in one layer."""
    if config.is_mla(layer):
        return 4 * positions * (config.kv_lora_rank + config.qk_rope_head_dim)
    tails = 3 * (config.conv_kernel_size - 1) * config.kda_width
    return 4 * (config.kda_width * config.kda_head_dim + tails)


def require_memory(need: MemoryNeed, available: int, decided_by: str) -> None:
    """Refuse, before anything is loaded, what does not fit; the message shows the arithmetic."""
    if need.total <= available:
        return
    raise MemoryFailure(
        f"the model needs {_gb(need.total)}: layers and head {_gb(need.trunk)}, routed experts {_gb(need.experts)}, "
        f"one sequence's state {_gb(need.state)}, processes {_gb(need.processes)}; {_gb(available)} are available "
        f"({decided_by}). Run fewer layers (--layers), a shorter prompt, or use a machine with more memory: this "
        "version holds every weight in memory"
    )


def _bytes(tensors: dict[str, TensorType]) -> int:
    return sum(BYTES_OF[dtype] * prod(shape) for dtype, shape in tensors.values())


def _gb(number: int) -> str:
    return f"{number / 1e9:.2f} GB"
