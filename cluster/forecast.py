"""The seconds a token should take on one host under a plan, from the speeds that were measured: `k3ray doctor`'s.

The formula is that of every prediction (token_time.py), all stages as one turn. The experts count as if no slot ever
held what is asked for: a cache makes it less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3ray.cluster.budget_plan import BudgetPlan
from k3ray.cluster.devices import CHUNK, EXPERT, DiskSpeed, MemorySpeed
from k3ray.cluster.memory_parts import expert_bytes
from k3ray.cluster.token_time import Turn
from k3ray.cluster.trip_times import CALL_S, DRIVER_S
from k3ray.workers.model.config import ModelConfig

DISK, KERNELS, UNKNOWN = "disk", "kernels", "not known"


@dataclass(frozen=True, slots=True)
class Forecast:
    """disk_s: reading what a token needs; None where the disk's speed is not known and would matter.

    kernels_s: going once over all its weights in memory, by the kernels' own speed, which memory bounds. turn_s: both,
    as far as the one goes on while the other does: no less than either.
    """

    disk_s: float | None
    kernels_s: float
    turn_s: float | None

    @property
    def seconds(self) -> float | None:
        """Of a token after the prompt, with the call of its stage."""
        return None if self.turn_s is None else self.turn_s + DRIVER_S + CALL_S

    @property
    def dominated_by(self) -> str:
        """The longer of the two."""
        if self.disk_s is None:
            return UNKNOWN
        return DISK if self.disk_s > self.kernels_s else KERNELS


def forecast(config: ModelConfig, plan: BudgetPlan, disk: Sequence[DiskSpeed], memory: MemorySpeed) -> Forecast:
    """What to expect of one host; the best of the measured depths counts, since the engine reads ahead."""
    rates = {kind: _best_rate(disk, kind) for kind in (CHUNK, EXPERT)}
    reads = {CHUNK: plan.trunk_bytes_per_token, EXPERT: plan.expert_bytes_per_token}
    experts = len(config.moe_layers) * config.num_experts_per_token * expert_bytes(config)
    trunk_s, experts_s = plan.trunk_bytes / memory.trunk_bytes_per_s, experts / memory.expert_bytes_per_s
    if not all(rates[kind] or not reads[kind] for kind in reads):
        return Forecast(None, trunk_s + experts_s, None)
    read = {kind: nbytes / rates[kind] if nbytes else 0.0 for kind, nbytes in reads.items()}
    turn = Turn(trunk_s, max(experts_s, read[EXPERT]), read[EXPERT] > experts_s, read[CHUNK], read[EXPERT])
    return Forecast(sum(read.values()), trunk_s + experts_s, turn.seconds())


def _best_rate(disk: Sequence[DiskSpeed], kind: str) -> float:
    return max((speed.bytes_per_s for speed in disk if speed.kind == kind), default=0.0)
