"""Of which model a saved state is: its config field by field, the layers that were run, and samples of the weights.

The trunk's matrices are sampled as a tape's are (workers/tape/identity.py), the small tensors and the rows of the
embedding and of one expert a layer besides, so that a copy in other shards is the same model and another checkpoint
of the same widths is not. A checkpoint that differs in other rows only is not told apart.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.a_log import read_a_log
from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import TensorReader, TensorReadError
from k3ray.workers.failure import Failure
from k3ray.workers.loading import Checkpoint
from k3ray.workers.tape.identity import config_differences, sample_tensor
from k3ray.workers.tape.manifest import config_fields
from k3ray.workers.tape.order import tape_tensors

EMBEDDING = "embed_tokens.weight"
SAMPLED_EMBEDDINGS = 8


class OtherModel(Failure):
    """A saved state of another model, or of another number of its layers."""

    exit_code = 2


class PartOfModel(Failure):
    """A folder with a part of the model, where all of it has to be sampled."""

    exit_code = 2


class StateIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model a state belongs to.

    model: the folder's name, and index_fingerprint: TensorIndex.fingerprint, for messages only. config: config_fields
    of the whole checkpoint. num_layers: how many were run. samples: what was sampled -> the digest of its bytes.
    """

    model: str
    index_fingerprint: str
    config: dict[str, Any]
    num_layers: int
    samples: dict[str, str]


def identify(checkpoint: Checkpoint) -> StateIdentity:
    """Read the samples of the layers that are run; PartOfModel, TensorReadError."""
    if checkpoint.partial:
        raise PartOfModel(
            f"{checkpoint.reader.index.directory}: holds a part of the model; --save-state and --load-state sample all "
            "layers that are run: name a folder with the whole model, or run the command where one is"
        )
    binding, reader, num_layers = checkpoint.binding, checkpoint.reader, checkpoint.config.num_hidden_layers
    wanted = {*range(num_layers), binding.config.num_hidden_layers}  # the head counts as one more
    tensors = [tensor for tensor in tape_tensors(binding.config) if tensor.layer in wanted]
    samples = {f"layer {tensor.layer} {tensor.short}": sample_tensor(binding, reader, tensor) for tensor in tensors}
    samples[EMBEDDING] = _sample_embedding(binding, reader)
    on_tape = {(tensor.layer, tensor.short) for tensor in tensors}
    for layer in range(num_layers):
        names = {s: name for s, name in binding.layer_tensors(layer).items() if (layer, s) not in on_tape}
        samples[f"layer {layer} small tensors"] = _sample_small(binding, reader, names)
        if binding.config.is_moe(layer):
            samples[f"layer {layer} experts"] = _sample_expert(checkpoint, layer)
    top = {short: name for short, name in binding.top.items() if short not in (EMBEDDING, shapes.LM_HEAD)}
    samples["final norms"] = _sample_small(binding, reader, top)
    directory = reader.index.directory
    return StateIdentity(
        model=directory.resolve().name,
        index_fingerprint=reader.index.fingerprint,
        config=config_fields(binding.config),
        num_layers=num_layers,
        samples=samples,
    )


def refuse_other_model(path: Path, saved: StateIdentity, here: StateIdentity, model_dir: Path) -> None:
    """Raise OtherModel with what differs, unless the state was saved with this model and as many of its layers."""
    other = f"{path}: this state was saved with another model ({saved.model}) than {model_dir}"
    advice = "Load it with the model it was saved with, or begin anew without --load-state"
    if differences := config_differences(saved.config, here.config):
        raise OtherModel(f"{other}: its config has {differences}. {advice}")
    if saved.num_layers != here.num_layers:
        raise OtherModel(
            f"{path}: this state was saved with the first {saved.num_layers} layers of {saved.model}, this run has "
            f"{here.num_layers}; give --layers {saved.num_layers}"
        )
    names = [name for name in {**here.samples, **saved.samples} if saved.samples.get(name) != here.samples.get(name)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise OtherModel(f"{other}: other values in {', '.join(names[:3])}{more}. {advice}")


def _sample_embedding(binding: Binding, reader: TensorReader) -> str:
    digest = hashlib.blake2b(digest_size=8)
    last = binding.config.vocab_size - 1
    for row in sorted({last * place // (SAMPLED_EMBEDDINGS - 1) for place in range(SAMPLED_EMBEDDINGS)}):
        digest.update(reader.read_row(binding.top[EMBEDDING], row).data)
    return digest.hexdigest()


def _sample_small(binding: Binding, reader: TensorReader, names: dict[str, str]) -> str:
    """Every byte of the tensors; A_log as its heads, since a copy may store it with or without the padding."""
    digest = hashlib.blake2b(digest_size=8)
    for short in sorted(names):
        digest.update(short.encode())
        if short == shapes.A_LOG:
            digest.update(read_a_log(reader, names[short], binding.config.kda_num_heads).data)
        else:
            digest.update(reader.read(names[short]).reshape(-1).data)
    return digest.hexdigest()


def _sample_expert(checkpoint: Checkpoint, layer: int) -> str:
    """One row of every tensor of one expert, another expert in every layer, from the first root that can give it."""
    roots = ((checkpoint.binding, checkpoint.reader), *checkpoint.mirrors)
    for number, (binding, reader) in enumerate(roots, start=1):
        digest = hashlib.blake2b(digest_size=8)
        names = binding.expert_tensors(layer, layer % binding.config.num_experts)
        try:
            for short in sorted(names):
                digest.update(reader.read_row(names[short], reader.entry(names[short]).shape[0] // 2).data)
        except TensorReadError:
            if number == len(roots):
                raise
            continue
        return digest.hexdigest()
    raise AssertionError("a checkpoint has at least one root")
