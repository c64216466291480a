"""How many experts each shard owns: by its slots first, then by the disks, where all fit by the memories.

Which experts these are follows from the counts (workers/expert_owners.py): plan and actors share the counts only.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3ray.workers.expert_owners import ExpertGroup


def share_experts(
    layers: Sequence[int],
    num_experts: int,
    holding: Sequence[frozenset[int]],
    slots: Sequence[int],
    disks: Sequence[float],
    memories: Sequence[float],
) -> tuple[ExpertGroup, ...]:
    """Share the experts of the layers out over shards; the layers that no shard's disks hold are left out.

    A shard owns what it has slots for; what is left goes to the disks by their speed. Where there are more slots than
    experts, memories by their speed. holding: the layers that each shard's disks hold.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for layer in layers:
        able = tuple(shard for shard, held in enumerate(holding) if layer in held)
        if able:
            groups.setdefault(able, []).append(layer)
    left, found = list(slots), []
    for able in sorted(groups, key=lambda shards: (len(shards), groups[shards][0])):
        total = len(groups[able]) * num_experts
        room = [left[shard] for shard in able]
        if sum(room) <= total:
            extra = share_whole(total - sum(room), [disks[shard] for shard in able])
            owned = [held + more for held, more in zip(room, extra, strict=True)]
        else:
            owned = _share_within(total, [memories[shard] for shard in able], room)
        counts = [0] * len(slots)
        for shard, count in zip(able, owned, strict=True):
            counts[shard] = count
            left[shard] -= min(left[shard], count)
        found.append(ExpertGroup(tuple(groups[able]), tuple(counts)))
    return tuple(sorted(found, key=lambda group: group.layers))


def share_whole(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts in proportion to the weights: largest remainders first, ties to the earlier."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [int(part) for part in exact]
    order = sorted(range(len(parts)), key=lambda place: (parts[place] - exact[place], place))
    for turn in range(total - sum(parts)):
        parts[order[turn % len(order)]] += 1
    return parts


def _share_within(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """The same with no part above its `most`; these add up to at least `total`."""
    parts = [0] * len(weights)
    while total:
        open_places = [place for place in range(len(parts)) if parts[place] < most[place]]
        wanted = share_whole(total, [weights[place] for place in open_places])
        for place, part in zip(open_places, wanted, strict=True):
            given = min(part, most[place] - parts[place])
            parts[place] += given
            total -= given
    return parts
