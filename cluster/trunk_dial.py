"""Every way to hold a larger or smaller part of the trunk in memory, from nothing to all of it, and what each costs.

Stages pin chunks all over their part of the tape (residency.py), all of them in step. Pure arithmetic; no budget is
known here.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3ray.cluster.budget_plan import HostRun
from k3ray.cluster.memory_parts import trunk_bytes
from k3ray.workers.tape.residency import copy_bytes, pinning_order


@dataclass(frozen=True, slots=True)
class TrunkDial:
    """Its notches are numbered from nothing pinned to everything.

    order: the stage that pins one more chunk at each notch after the first. memory_bytes: (notches,) all that is
    mapped for the trunk. pinned_bytes: (notches,) of them, trunk that stays.
    """

    num_stages: int
    order: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    pinned_bytes: tuple[int, ...]

    @property
    def last(self) -> int:
        """The notch at which everything is pinned."""
        return len(self.memory_bytes) - 1

    def pinned_chunks(self, notch: int) -> tuple[int, ...]:
        """How many chunks every stage pins."""
        return tuple(self.order[:notch].count(stage) for stage in range(self.num_stages))

    def highest(self, memory_bytes: int) -> int | None:
        """The notch with most pinned that so much memory holds; None when it holds none.

        The last one has no ring and may take less than some before it.
        """
        return next((notch for notch in range(self.last, -1, -1) if self.memory_bytes[notch] <= memory_bytes), None)

    def of_pinned(self, pinned_bytes: int) -> int:
        """The highest notch that pins no more than so many bytes."""
        return max(notch for notch in range(self.last + 1) if self.pinned_bytes[notch] <= pinned_bytes)


def trunk_dial(run: HostRun) -> TrunkDial:
    """The dial of a run. Without a tape it has one notch: every matrix in memory."""
    layout = run.layout
    if layout is None:
        everything = trunk_bytes(run.config, range(run.config.num_hidden_layers), head=True)
        return TrunkDial(run.num_stages, (), (everything,), (everything,))
    sizes = [[layout.chunks[number].nbytes for number in chunks] for chunks in run.stage_chunks]
    turns = sorted(
        ((count + 1) / len(of_stage), stage, place)
        for stage, of_stage in enumerate(sizes)
        for count, place in enumerate(pinning_order(len(of_stage)))
    )
    taken = [0] * run.num_stages
    copies = [copy_bytes(layout, chunks) for chunks in run.stage_chunks]

    def streaming(stage: int) -> int:
        ring = min(run.ring_chunks, len(sizes[stage]) - taken[stage]) * layout.chunk_bytes
        return ring + copies[stage][taken[stage]]

    pinned, around = 0, sum(streaming(stage) for stage in range(run.num_stages))
    memory_bytes, pinned_bytes = [around], [0]
    for _, stage, place in turns:
        around -= streaming(stage)
        taken[stage] += 1
        around += streaming(stage)
        pinned += sizes[stage][place]
        memory_bytes.append(pinned + around)
        pinned_bytes.append(pinned)
    return TrunkDial(run.num_stages, tuple(stage for _, stage, _ in turns), tuple(memory_bytes), tuple(pinned_bytes))
