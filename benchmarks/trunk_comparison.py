"""One checkpoint whose trunk is stored in other forms: how far the weights and the logits are from the exact ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.trunk_forms import StoredMatrices, TrunkForm, WeightError, row_blocks
from k3ray.kernels.threads import RowPool
from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.expert_reader import ExpertReader
from k3ray.workers.experts import ExpertStore, LocalExperts
from k3ray.workers.frames import ActivationFrame
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.embedding import Embedding
from k3ray.workers.model.matrices import Matrices, ShardMatrices
from k3ray.workers.model.slice import Slice, SliceParts
from k3ray.workers.model.weights import WeightSources, read_head, read_layer
from k3ray.workers.tape.order import TapeTensor, full_name, tape_tensors

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prefill. logits: (tokens, vocab) f32. experts: the chosen ids of every MoE layer, one after the other."""

    logits: npt.NDArray[np.float32]
    experts: list[npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Row:
    """How far one stored form moves the logits. Columns as in the results file."""

    form: str
    of: str
    bits_per_weight: float
    weight_error: float
    logit_error: float  # root of the mean square, relative to the exact logits' deviation from their mean
    kl: float  # mean over positions, exact against stored, in nats
    top1_kept: float
    experts_kept: float  # share of the chosen (token, layer, expert) that is chosen still


def kind_of(config: ModelConfig, tensor: TapeTensor) -> str:
    """What a matrix is for, alike in all layers of a kind."""
    if tensor.layer == config.num_hidden_layers:
        return "head"
    part = tensor.short.removesuffix(".weight").rpartition(".")[2].partition("_proj")[0]
    if tensor.short.startswith("self_attn."):
        return f"{'MLA' if config.is_mla(tensor.layer) else 'KDA'} {part}"
    if tensor.short.startswith("mlp."):
        return f"dense {part}"
    if "shared_experts" in tensor.short:
        return f"shared {part}"
    return "router" if part == "gate" else f"latent {part.removeprefix('routed_expert_')}"


class Comparison:
    """One checkpoint, its exact logits, and what other forms of its trunk do."""

    def __init__(self, model: Path, ids: list[int], pool: RowPool) -> None:
        index = open_index(model)
        self.config = read_config(model)
        self.binding, self.reader, self.pool, self.ids = bind(self.config, index), TensorReader(index), pool, ids
        self.tensors = tape_tensors(self.config)
        self.shards = ShardMatrices(self.binding, self.reader)
        self.exact = self.run(self.shards)

    def kinds(self) -> dict[str, list[TapeTensor]]:
        """The matrices by what they are for."""
        found: dict[str, list[TapeTensor]] = defaultdict(list)
        for tensor in self.tensors:
            found[kind_of(self.config, tensor)].append(tensor)
        return dict(found)

    def weight_errors(self, tensors: Iterable[TapeTensor], forms: Iterable[TrunkForm]) -> dict[str, WeightError]:
        """How far each form is from the weights, over some matrices together."""
        errors = {form.name: WeightError() for form in forms}
        for tensor in tensors:
            for rows in row_blocks(self.reader.read(full_name(self.binding, tensor))):
                for form in forms:
                    errors[form.name].add(rows, form.stored(rows))
        return errors

    def compare(self, form: TrunkForm, of: str, tensors: list[TapeTensor]) -> Row:
        """Run with these matrices stored in another form."""
        chosen = frozenset((tensor.layer, tensor.short) for tensor in tensors)
        outcome = self.run(StoredMatrices(self.shards, form, chosen))
        error = self.weight_errors(tensors, [form])[form.name].relative
        return Row(form.name, of, form.bits_per_weight, error, *_distances(self.exact, outcome))

    def run(self, matrices: Matrices) -> Outcome:
        """Prefill the ids, layer by layer, with nothing kept but a layer's matrices."""
        config, experts = self.config, list[npt.NDArray[np.int32]]()
        sources = WeightSources(self.binding, self.reader, matrices, self.pool)
        store = ExpertStore(config, ExpertReader([(self.binding, self.reader.index)]), CirclePolicy(64), self.pool)
        embedding = Embedding(self.reader, self.binding.top["embed_tokens.weight"], config.vocab_size)
        count, last = len(self.ids), config.num_hidden_layers - 1
        frame = ActivationFrame(
            0, np.zeros(count, np.int64), np.arange(count), np.array(self.ids, np.int32), np.ones(count, np.bool_),
            np.zeros((count, 0), np.float32), np.zeros((count, 0, 0), np.float32),
        )  # fmt: skip

        def observe(name: str, layer: int, values: npt.NDArray[np.generic]) -> None:
            if name == "router_ids":
                experts.append(values.astype(np.int32))

        for layer in range(config.num_hidden_layers):
            parts = SliceParts(
                config,
                (read_layer(sources, layer),),
                embedding if layer == 0 else None,
                read_head(sources) if layer == last else None,
            )
            one = Slice(parts, LocalExperts(store), self.pool)
            one.open_sequence(0, count)
            frame = one.forward(frame, observe)
        logits = one.logits(frame)
        store.close()
        return Outcome(logits, experts)


def _distances(exact: Outcome, stored: Outcome) -> tuple[float, float, float, float]:
    ours, theirs = exact.logits.astype(np.float64), stored.logits.astype(np.float64)
    spread = np.sqrt(np.square(ours - ours.mean(axis=1, keepdims=True)).mean())
    error = float(np.sqrt(np.square(theirs - ours).mean()) / spread)
    log_p, log_q = _log_softmax(ours), _log_softmax(theirs)
    kl = float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())
    top1 = float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())
    kept = [
        np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(first, second, strict=True)])
        for first, second in zip(exact.experts, stored.experts, strict=True)
    ]
    return error, kl, top1, float(np.mean(kept)) if kept else 1.0


def _log_softmax(logits: Doubles) -> Doubles:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
