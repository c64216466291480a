"""The embedded model: reproducible, small, with every kind of layer, and a vocabulary that its tokenizer reads."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from k3ray import embedded_model
from k3ray.embedded_model import EmbeddedModelError, embedded_model_dir
from k3ray.tokenizer import load_tokenizer
from k3ray.workers.model.config import read_config

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_embedded_model"


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "README.md"}


def test_the_script_makes_these_bytes_again(tmp_path: Path) -> None:
    target = tmp_path / "embedded"
    target.mkdir()
    (target / "README.md").write_text("kept")
    (target / "model-00011-of-000011.safetensors").write_text("of an earlier model")
    for _ in range(2):
        subprocess.run([sys.executable, str(SCRIPT), str(target)], check=True, capture_output=True)
        assert digests(target) == digests(embedded_model_dir())
    assert (target / "README.md").read_text() == "kept"
    assert list(tmp_path.iterdir()) == [target]


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in embedded_model_dir().iterdir()) < 3_000_000


def test_it_has_every_kind_of_layer() -> None:
    config = read_config(embedded_model_dir())
    layers = range(config.num_hidden_layers)
    kinds = {(config.is_mla(layer), config.is_moe(layer)) for layer in layers}
    assert kinds == {(False, False), (False, True), (True, True)}
    assert config.is_mla(layers[-1]) and config.is_mla(layers[-2]) and not config.is_mla(layers[-3])
    assert len([layer for layer in layers if layer % config.attn_res_block_size == 0]) >= 3
    assert config.num_experts >= 4 * config.num_experts_per_token and config.kda_num_heads < config.kda_head_dim


def test_its_tokenizer() -> None:
    folder = embedded_model_dir()
    config = read_config(folder)
    tokenizer = load_tokenizer(folder, config.vocab_size)
    assert tokenizer.vocab_size == config.vocab_size
    assert {"[EOS]", "<|end_of_msg|>"} == {tokenizer.decode([i]) for i in tokenizer.end_ids(config.eos_token_id)}
    for text in ("How are you? The answer is written by another machine.", "你好！这个模型很大。", "\0\n🧠"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("The machines read the weights of the model.")) <= 12
    assert len(tokenizer.encode("你好！这个模型很大。")) <= 7


def test_an_incomplete_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "PACKAGE", tmp_path)
    with pytest.raises(EmbeddedModelError, match="install k3ray again"):
        embedded_model_dir()
