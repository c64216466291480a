"""Whether a mirror holds the same experts: sampled rows are compared before any expert is taken from it.

Binding proves names and shapes, which are the same in every checkpoint of one architecture. One row of each tensor of
one expert in every layer tells other weights, wherever the copy lies and however it is cut into shards; copies that
differ in other rows only are not told apart (`k3ray verify --deep` compares every byte with the published checksums).
"""

from __future__ import annotations

from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import TensorReader, TensorReadError
from k3ray.workers.failure import Failure

Root = tuple[Binding, TensorReader]


class OtherMirror(Failure):
    """A mirror with experts of another model."""

    exit_code = 2


def refuse_other_experts(first: Root, mirror: Root) -> None:
    """Raise OtherMirror where a sampled row differs; what one of the two cannot read is what mirrors are for."""
    (binding, reader), (_, mirror_reader) = first, mirror
    for layer in binding.config.moe_layers:
        expert = layer % binding.config.num_experts
        theirs = mirror[0].expert_tensors(layer, expert)
        for short, name in binding.expert_tensors(layer, expert).items():
            row = reader.entry(name).shape[0] // 2
            try:
                same = reader.read_row(name, row).tobytes() == mirror_reader.read_row(theirs[short], row).tobytes()
            except TensorReadError:
                continue
            if not same:
                raise OtherMirror(
                    f"--mirror {mirror_reader.index.directory}: found other values than in {reader.index.directory} in "
                    f"row {row} of layer {layer} expert {expert}'s {short}, expected a copy of this model; name one, "
                    "or leave --mirror away"
                )
