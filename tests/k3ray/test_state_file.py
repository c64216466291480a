"""A saved state that is damaged, of another model, or no saved state at all is refused with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray import state_file
from k3ray.continuation import Continuation
from k3ray.state_file import StateDamaged, StateRefused, open_state
from k3ray.state_identity import OtherModel, identify, refuse_other_model
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.loading import CheckpointSpec, open_checkpoint
from k3ray.workers.model.snapshot import SnapshotMismatch
from tests.placed import PROMPT, Place, places, run


@pytest.fixture(scope="module")
def place(k3b_dir: Path) -> Place:
    return places(k3b_dir)


@pytest.fixture
def saved(place: Place, tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    run(place(3, 2), ids=PROMPT, save=path)
    return path


@pytest.fixture(scope="module")
def saved_bytes(place: Place, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "state"
    run(place(1, 0), [3, 5], save=path, gen=1)
    return path.read_bytes()


def test_one_changed_value_is_refused(saved: Path) -> None:
    contents = bytearray(saved.read_bytes())
    contents[open_state(saved).document.pieces[0].nbytes // 2] ^= 1
    saved.write_bytes(contents)
    with pytest.raises(StateDamaged, match="the saved state of layer 0 was changed"):
        open_state(saved)


@settings(max_examples=120)
@given(data=st.data())
def test_every_changed_byte_and_every_cut_is_refused(
    saved_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    contents = bytearray(saved_bytes)
    begin = len(state_file.BEGIN)
    regions = st.one_of(
        st.integers(0, len(contents) - 1),
        st.integers(max(0, len(contents) - 3000), len(contents) - 1),
        st.integers(0, begin + 200),
    )
    spot = data.draw(regions)
    if data.draw(st.booleans()):
        contents[spot] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del contents[spot:]
    path = tmp_path_factory.mktemp("damaged") / "state"
    path.write_bytes(contents)
    with pytest.raises((StateDamaged, StateRefused)) as refusal:
        open_state(path)
    unrecognised = bytes(contents[:begin]) != state_file.BEGIN
    assert refusal.value.exit_code == (2 if unrecognised else 1) and str(path) in str(refusal.value)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the document and put its digest right, as only a program would."""
    contents = path.read_bytes()
    length = int.from_bytes(contents[-state_file.TAIL_BYTES :][:8], "little")
    start = len(contents) - state_file.TAIL_BYTES - length
    document = msgspec.json.decode(contents[start : start + length])
    change(document)
    text = msgspec.json.encode(document)
    size = len(text).to_bytes(8, "little")
    digest = bytes.fromhex(state_file._digest(text + size))
    path.write_bytes(contents[:start] + text + size + digest + state_file.END)


@pytest.mark.parametrize(("change", "expected"), [
    ({"version": 2}, "found a saved state of version 2, expected 1"),
    ({"num_committed": 99}, "99 of them committed"),
    ({"num_committed": 0}, "0 of them committed in 9 layers"),
    ({"prompt_ids": [512]}, "do not belong together"),
    ({"prompt_ids": [], "generated_ids": []}, "found 0 ids"),
    ({"logits": "AAAA"}, "3 bytes of logits"),
    ({"num_committed": "many"}, "a document that is not understood"),
    ({"another": 1}, "a document that is not understood"),
])  # fmt: skip
def test_documents_of_other_programs(saved: Path, change: dict[str, Any], expected: str) -> None:
    rewritten(saved, lambda document: document.update(change))
    with pytest.raises(StateRefused, match=expected):
        open_state(saved)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"PK\x03\x04" * 100)
    for name in ("empty", "other"):
        with pytest.raises(StateRefused, match="found another kind of file"):
            open_state(tmp_path / name)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StateRefused, match="name a file that can be read"):
            open_state(path)


def test_other_layers_and_a_capacity_too_small(place: Place, saved: Path) -> None:
    with pytest.raises(OtherModel, match=r"the first 9 layers of k3b, this run has 5; give --layers 9"):
        run(place(1, 0, layers=5), [], load=saved)
    state = open_state(saved)
    with pytest.raises(SnapshotMismatch, match="does not fit in the 10 positions"):
        place(1, 0).driver.restore(state.ids[:-1], state.pieces(), 10)


@pytest.fixture
def copy(k3b_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "other-model"
    shutil.copytree(k3b_dir, folder, ignore=shutil.ignore_patterns("golden.*"))
    return folder


def refused(folder: Path, saved: Path) -> str:
    with pytest.raises(OtherModel) as refusal:
        Continuation(open_checkpoint(CheckpointSpec(folder, None, 9)), saved, None, lambda line: None)
    assert "(k3b) than" in str(refusal.value) and str(folder) in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(("tensor", "expected"), [
    ("layers.4.self_attn.q_proj.weight", "layer 4 self_attn.q_proj.weight"),
    ("layers.3.input_layernorm.weight", "layer 3 small tensors"),
    ("layers.2.self_attn.dt_bias", "layer 2 small tensors"),
    ("layers.5.block_sparse_moe.experts.5.w2.weight_packed", "layer 5 experts"),
    ("embed_tokens.weight", "embed_tokens.weight"),
    ("norm.weight", "final norms"),
])  # fmt: skip
def test_other_weights_of_the_same_widths(copy: Path, saved: Path, tensor: str, expected: str) -> None:
    entry = open_index(copy).find(f"language_model.model.{tensor}")
    assert entry is not None
    with entry.path.open("r+b") as file:
        file.seek(entry.offset)
        contents = bytes(byte ^ 1 for byte in file.read(entry.nbytes))
        file.seek(entry.offset)
        file.write(contents)
    assert f"other values in {expected}" in refused(copy, saved)


def test_another_config(copy: Path, saved: Path) -> None:
    text = (copy / "config.json").read_text()
    assert '"routed_scaling_factor"' in text
    path = copy / "config.json"
    config = msgspec.json.decode(text)
    config["text_config"]["routed_scaling_factor"] = 1.75
    path.write_bytes(msgspec.json.encode(config))
    assert "its config has routed_scaling_factor" in refused(copy, saved)


def test_a_copy_with_another_name_and_end_id_is_the_same_model(copy: Path, saved: Path) -> None:
    config = msgspec.json.decode((copy / "config.json").read_text())
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = 9
    (copy / "config.json").write_bytes(msgspec.json.encode(config))
    checkpoint = open_checkpoint(CheckpointSpec(copy, None, 9))
    refuse_other_model(saved, open_state(saved).document.identity, identify(checkpoint), copy)
