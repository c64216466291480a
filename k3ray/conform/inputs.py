"""What a layer is fed in a conformance run: random streams of realistic size, or streams that somebody recorded.

Two recordings are understood: golden.npz, what the official code computed on a golden checkpoint (its outputs come
with it), and the frames that `k3ray conform --ids ... --save-inputs` wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig

Float32Array = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

SMALLEST_RMS, LARGEST_RMS = 0.7, 3.0  # of the goldens' streams, from a block's first layer to its twelfth
GOLDEN_STAGES = ("attn_in", "attn_normed", "attn_out", "mlp_in", "mlp_out", "layer_out")
GOLDEN_LATENTS = {"latent_in": "latent_in", "latent_aggregate": "latent_agg", "latent_normed": "latent_normed"}


class InputsFailure(Failure):
    """A recording that is not there, is not one, or does not fit the model."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """prefix (tokens, hidden) f32, blocks (tokens, n, hidden) f32: what enters a layer. source: where they come from.

    stages, state: what others computed from them, by name; expert_ids (tokens, k): the experts they chose, as a set.
    """

    prefix: Float32Array
    blocks: Float32Array
    source: str
    stages: dict[str, Array] = field(default_factory=dict)
    state: dict[str, Array] = field(default_factory=dict)
    expert_ids: Array | None = None


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A whole sequence, with the logits (ids, vocab) that others computed for it, or (0, 0)."""

    name: str
    ids: list[int]
    logits: Array


Inputs = Callable[[int], LayerInputs]


def num_blocks_before(config: ModelConfig, layer: int) -> int:
    """How many finished blocks enter a zero-based layer."""
    return -(-layer // config.attn_res_block_size)


def random_inputs(config: ModelConfig, layer: int, tokens: int, seed: int) -> LayerInputs:
    """Normally distributed streams, every row of a size of its own between the goldens' smallest and largest."""
    generator = np.random.default_rng([seed, layer])
    rows = num_blocks_before(config, layer) + 1
    values = generator.standard_normal((tokens, rows, config.hidden_size))
    low, high = np.log(SMALLEST_RMS), np.log(LARGEST_RMS)
    values *= np.exp(generator.uniform(low, high, (tokens, rows, 1)))
    streams = values.astype(np.float32)
    return LayerInputs(streams[:, -1].copy(), streams[:, :-1].copy(), f"random, seed {seed}")


class Recording:
    """A recorded npz, checked as far as its names and shapes go; embed: (ids) -> (ids, hidden) f32."""

    def __init__(self, path: Path, config: ModelConfig, embed: Callable[[list[int]], Float32Array]) -> None:
        self.path = path
        self._config = config
        self._embed = embed
        self._arrays = _read(path)
        self.is_golden = {"p0_ids", "p0_layer_out"} <= set(self._arrays)
        if not self.is_golden and not any(name.startswith("prefix_L") for name in self._arrays):
            found = ", ".join(sorted(self._arrays)[:6]) or "no array"
            raise InputsFailure(
                f"--inputs {path}: found {found}; expected a golden.npz (p0_ids, p0_layer_out) or what `k3ray conform "
                "--save-inputs` writes (prefix_L0, blocks_L0, ...)"
            )

    def layer(self, layer: int) -> LayerInputs:
        """Return what entered a zero-based layer; InputsFailure when it is not recorded or does not fit."""
        try:
            fed = self._golden(layer) if self.is_golden else self._frames(layer)
        except (IndexError, TypeError, ValueError) as error:
            raise InputsFailure(
                f"--inputs {self.path}: layer {layer}: arrays that cannot be a recording ({error}); record it again"
            ) from None
        largest = np.abs(fed.prefix).max(axis=1, initial=0.0)
        if not len(largest) or not np.isfinite(largest).all() or not largest.all():
            raise InputsFailure(
                f"--inputs {self.path}: layer {layer}: found {len(largest)} tokens, {int((largest == 0).sum())} of "
                "them all zero; expected at least one token, each finite and none all zero: zeros agree with anything"
            )
        return fed

    def prompts(self) -> list[RecordedPrompt]:
        """Return the golden's prompts, each with its greedy continuation: the logits are of every position."""
        found = []
        for number in range(100):
            if f"p{number}_logits" not in self._arrays:
                break
            ids, greedy = (self._array(f"p{number}_{part}").tolist() for part in ("ids", "greedy"))
            rows = (self._arrays[f"p{number}_logits"], self._array(f"p{number}_greedy_logits")[1:])
            found.append(RecordedPrompt(f"p{number}", ids + greedy[:-1], np.concatenate(rows)))
        return found

    def _frames(self, layer: int) -> LayerInputs:
        prefix, blocks = (self._array(f"{part}_L{layer}").astype(np.float32) for part in ("prefix", "blocks"))
        expected = (len(prefix), num_blocks_before(self._config, layer), self._config.hidden_size)
        if prefix.shape != (expected[0], expected[2]) or blocks.shape != expected:
            raise InputsFailure(
                f"--inputs {self.path}: layer {layer}: found streams {prefix.shape} and {blocks.shape}, expected "
                f"(tokens, {expected[2]}) and (tokens, {expected[1]}, {expected[2]}): recorded on another model?"
            )
        return LayerInputs(prefix, blocks, f"recorded in {self.path.name}")

    def _golden(self, layer: int) -> LayerInputs:
        """A layer's input is the last one's output; the blocks are what entered the layers that begin a block."""
        outputs = self._array("p0_layer_out")
        hidden, layers = self._config.hidden_size, self._config.num_hidden_layers
        if outputs.ndim != 3 or outputs.shape[0] != layers or outputs.shape[2] != hidden:
            raise InputsFailure(
                f"--inputs {self.path}: recorded layers {outputs.shape}, this model has ({layers}, tokens, "
                f"{hidden}): name the golden.npz that belongs to the checkpoint"
            )
        entering = [self._embed(self._array("p0_ids").tolist()), *outputs[:-1].astype(np.float32)]
        begins = range(0, layer, self._config.attn_res_block_size)
        blocks = np.stack([entering[begin] for begin in begins], axis=1) if begins else entering[0][:, None][:, :0]
        stages = {name: self._array(f"p0_{name}")[layer] for name in GOLDEN_STAGES}
        recorded = {**GOLDEN_LATENTS, "shared_out": "shared_out"}
        for name, theirs in recorded.items():
            if (values := self._arrays.get(f"p0_{theirs}_L{layer}")) is not None:
                stages[name] = values
        return LayerInputs(
            entering[layer], blocks, f"recorded by the official code in {self.path.name}",
            stages, self._golden_state(layer), self._golden_experts(layer),
        )  # fmt: skip

    def _golden_state(self, layer: int) -> dict[str, Array]:
        """KDA: the matrices are recorded value channel first, the last inputs of the convolutions channel first."""
        if (matrices := self._arrays.get(f"p0_kda_state_L{layer}")) is None:
            return {}
        kept = self._config.conv_kernel_size - 1
        tails = {f"tail_{part}": self._array(f"p0_conv_{part}_L{layer}").T[-kept:] for part in ("q", "k", "v")}
        return {"matrices": matrices.transpose(0, 2, 1), **tails}

    def _golden_experts(self, layer: int) -> Array | None:
        if layer not in self._config.moe_layers:
            return None
        return np.asarray(self._array("p0_router_idx")[layer - self._config.moe_layers.start])

    def _array(self, name: str) -> Array:
        if name not in self._arrays:
            raise InputsFailure(f"--inputs {self.path}: found no array {name}; record this layer, or leave it out")
        return self._arrays[name]


def _read(path: Path) -> dict[str, Array]:
    try:
        with np.load(path) as archive:
            if not hasattr(archive, "files"):
                raise InputsFailure(f"--inputs {path}: found a single array (.npy), expected an .npz of named arrays")
            return {name: archive[name] for name in archive.files}
    except InputsFailure:
        raise
    except Exception as error:  # noqa: BLE001 - numpy and zipfile raise many kinds for a file that is none of theirs
        raise InputsFailure(f"--inputs {path}: cannot be read as .npz ({error}); name a recording") from None
