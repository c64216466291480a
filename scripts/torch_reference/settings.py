"""The numbers of config.json that the formulas need, as the file has them: a missing one is a KeyError."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MLA_LATENT_EPS = 1e-6  # the official code builds these two norms without the config's eps


@dataclass(frozen=True, slots=True)
class Settings:
    """config: config.json's text part. linear: its KDA part."""

    config: dict[str, Any]
    linear: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.config[name]

    @property
    def eps(self) -> float:
        """eps of every norm but MLA's two."""
        return float(self.config["rms_norm_eps"])

    def attends_with_mla(self, layer: int) -> bool:
        """Whether a zero-based layer is an MLA layer: the file counts from one."""
        return layer + 1 in self.linear["full_attn_layers"]

    def routes(self, layer: int) -> bool:
        """Whether a zero-based layer has routed experts."""
        return layer >= int(self.config["first_k_dense_replace"])

    def begins_block(self, layer: int) -> bool:
        """Whether the prefix sum is put away as a block when this layer begins."""
        return layer % int(self.config["attn_res_block_size"]) == 0


def read_settings(path: Path) -> Settings:
    """Read a config.json, nested under text_config as released or flat."""
    document = json.loads(path.read_text("utf-8"))
    config = document.get("text_config", document)
    return Settings(config, config.get("linear_attn_config", config))
