"""NaN scale bytes of experts: a checkpoint that has one is not packed, though its tape would hold none of them."""

from __future__ import annotations

from collections.abc import Callable

from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.shapes import expert_tensors, nbytes
from k3ray.workers.checkpoint.tensors import TensorReader, count_nan_scales
from k3ray.workers.failure import Failure

MAX_LISTED = 5
SCALES = ".weight_scale"


class DamagedScales(Failure):
    """Experts whose scale bytes hold the format's NaN."""


def refuse_damaged_scales(
    binding: Binding, reader: TensorReader, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Read every scale byte of every expert, 5.5 % of the released model; DamagedScales names the first tensors.

    `progress` is told (bytes done, bytes in all). Raises TensorReadError where a shard cannot be read.
    """
    config = binding.config
    sizes = {short: nbytes(kind) for short, kind in expert_tensors(config).items() if short.endswith(SCALES)}
    total = sum(sizes.values()) * len(config.moe_layers) * config.num_experts
    done, found = 0, []
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            names = binding.expert_tensors(layer, expert)
            found += [names[short] for short in sizes if count_nan_scales(reader.read(names[short]))]
            done += sum(sizes.values())
            progress(done, total)
    if found:
        more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
        raise DamagedScales(
            f"{reader.index.directory}: found NaN scale bytes in {', '.join(found[:MAX_LISTED])}{more}, expected none; "
            "nothing was written. Run `k3ray verify` and fetch these shards again"
        )
