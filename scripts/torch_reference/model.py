"""The layers in order, and the face of the reference: numpy arrays in, float64 numpy arrays out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_reference.arithmetic import matmul, mix, rms_norm
from torch_reference.attention import kda, mla
from torch_reference.feed_forward import mixture, mlp, scores_of, select
from torch_reference.settings import read_settings
from torch_reference.tensors import TensorFolder

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """One layer's answer for a whole sequence.

    prefix (tokens, hidden), blocks (tokens, n, hidden): what leaves the layer. stages: values on the way, by name.
    state: what the sequence leaves behind, by name. expert_ids (tokens, k), selection (tokens, experts): None where
    the layer does not route.
    """

    prefix: Floats
    blocks: Floats
    stages: dict[str, Floats]
    state: dict[str, Floats]
    expert_ids: Ids | None
    selection: Floats | None


class ReferenceModel:
    """A checkpoint seen through PyTorch. dtype: "float32" or "float64"."""

    def __init__(self, folder: Path, config: Path, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._tensors = TensorFolder(folder)
        self._settings = read_settings(config)
        self._dtype = {"float32": torch.float32, "float64": torch.float64}[dtype]

    def embed(self, ids: list[int]) -> Floats:
        """Return (ids, hidden)."""
        return _array(self._tensors.rows("embed_tokens.weight", ids).to(self._dtype))

    def run_layer(
        self,
        layer: int,
        prefix: npt.NDArray[np.floating],
        blocks: npt.NDArray[np.floating],
        choose: Callable[[Floats, Ids], Ids] = lambda selection, ids: ids,
    ) -> ReferenceRun:
        """Run a zero-based layer on a whole sequence: prefix (tokens, hidden), blocks (tokens, n, hidden).

        choose: given the selection scores and the ids (tokens, k) that they choose, returns the ids that are used.
        """
        settings, read = self._settings, self._reader(layer)
        p, b = self._tensor(prefix), self._tensor(blocks)
        stages: dict[str, Tensor] = {}
        h = self._mix(b, p, read, "self_attention_res") if b.shape[1] else p
        stages["attn_in"] = h
        begins = settings.begins_block(layer)
        if begins:
            b = torch.cat([b, p[:, None]], dim=1)
        normed = rms_norm(h, read("input_layernorm.weight"), settings.eps)
        attend = mla if settings.attends_with_mla(layer) else kda
        attended = attend(settings, self._reader(layer, "self_attn."), normed)
        stages |= {"attn_normed": normed, "attn_out": attended.out}
        p = attended.out if begins else p + attended.out
        h = self._mix(b, p, read, "mlp_res")
        stages["mlp_in"] = h
        x = rms_norm(h, read("post_attention_layernorm.weight"), settings.eps)
        expert_ids = selection = None
        if settings.routes(layer):
            moe = self._reader(layer, "block_sparse_moe.")
            scores, selected_by = scores_of(moe, x)
            selection, chosen = _array(selected_by), select(selected_by, int(settings["num_experts_per_token"]))
            expert_ids = choose(selection, chosen.numpy())
            stages |= mixture(settings, moe, x, torch.from_numpy(expert_ids), scores)
        else:
            stages["mlp_out"] = mlp(settings, read, "mlp", x)
        stages["layer_out"] = p + stages["mlp_out"]
        state = {name: _array(value) for name, value in attended.state.items()}
        arrays = {name: _array(value) for name, value in stages.items()}
        return ReferenceRun(arrays["layer_out"], _array(b), arrays, state, expert_ids, selection)

    def logits(self, prefix: npt.NDArray[np.floating], blocks: npt.NDArray[np.floating]) -> Floats:
        """Return (tokens, vocab) for the streams that leave the last layer."""
        mixed = self._mix(self._tensor(blocks), self._tensor(prefix), self._tensors.top, "output_attn_res")
        normed = rms_norm(mixed, self._tensors.top("norm.weight"), self._settings.eps)
        return _array(matmul(self._tensors.top("lm_head.weight"), normed))

    def _mix(self, blocks: Tensor, prefix: Tensor, read: Callable[[str], Tensor], name: str) -> Tensor:
        norm, projection = read(f"{name}_norm.weight"), read(f"{name}_proj.weight")
        return mix(blocks, prefix, norm, projection, self._settings.eps)

    def _reader(self, layer: int, below: str = "") -> Callable[[str], Tensor]:
        return lambda name: self._tensors.layer(layer, below + name)

    def _tensor(self, values: npt.NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self._dtype)


def _array(values: Tensor) -> Floats:
    return values.to(torch.float64).numpy()
