"""The audit of folders: what does not close is named, whatever it is; the figures are those of plain formulas."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.audit.chosen_tensors import LayerChoiceError, default_layers, parse_layers
from k3ray.audit.making import AuditOptions, make_audit
from k3ray.audit.page import render
from k3ray.audit.snapshot import Snapshot, Statement
from k3ray.audit.source_files import DirectoryFiles
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import read_config

PREFIX = "language_model.model.layers."
INDEX = "model.safetensors.index.json"
Header = dict[str, Any]


def audited(folder: Path, layers: str | None = None) -> Snapshot:
    return make_audit(DirectoryFiles(folder), AuditOptions(layers, threads=0))


def disagreeing(folder: Path) -> dict[str, Statement]:
    return {statement.id: statement for statement in audited(folder).disagreements}


@pytest.fixture
def copy(k3b_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in k3b_dir.iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copyfile(path, folder / path.name)
    return folder


def shard_of(folder: Path, name: str) -> Path:
    return folder / str(json.loads((folder / INDEX).read_text())["weight_map"][name])


def edit_header(path: Path, change: Callable[[Header], None]) -> None:
    """Change a shard's header and keep its data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_json(path: Path, change: Callable[[Header], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def write_values(folder: Path, name: str, change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Change a tensor's float32 values where they lie."""
    entry = open_index(folder).find(name)
    assert entry is not None
    values = np.memmap(entry.path, np.float32, "r+", entry.offset, entry.nbytes // 4)
    change(values)
    values.flush()


@pytest.mark.parametrize("fixture", ["k3a_dir", "k3b_dir"])
def test_a_golden_closes(fixture: str, request: pytest.FixtureRequest) -> None:
    """The vision rules are ours; the goldens' headers, which are not, agree with them."""
    folder = request.getfixturevalue(fixture)
    snapshot = audited(folder)
    assert snapshot.disagreements == ()
    assert all(row.agrees is True and row.letter == "O" for row in snapshot.kinds)
    assert {row.where for row in snapshot.kinds} == {"text", "routed experts", "vision", "projector"}
    shape = next(statement for statement in snapshot.statements if statement.id == "a_log.shape")
    assert shape.main
    assert (shape.kind, shape.agrees, shape.view) == ("O", None, "parameters")
    heads = read_config(folder).kda_num_heads
    assert shape.expected.startswith(f"[{heads}], one value a head")
    tail = next(statement for statement in snapshot.statements if statement.id == "a_log.tail")
    assert tail.agrees
    assert render(snapshot)


def test_a_transposed_tensor_is_named(copy: Path) -> None:
    name = f"{PREFIX}3.block_sparse_moe.gate.weight"
    edit_header(shard_of(copy, name), lambda header: header[name]["shape"].reverse())
    found = disagreeing(copy)
    assert {"tensors.shapes", "tensors.bound"} <= set(found)
    assert "gate.weight BF16 [160, 16]" in found["tensors.shapes"].found
    assert "transposed" in found["tensors.bound"].found
    rows = [row for row in audited(copy).kinds if row.kind.endswith(".gate.weight")]
    assert {(row.shape, row.entries, row.expected_entries, row.agrees) for row in rows} == {
        ((16, 160), 7, 8, False),
        ((160, 16), 1, 0, False),
    }


def test_a_dtype_of_the_same_size_is_named(copy: Path) -> None:
    name = f"{PREFIX}1.self_attn.dt_bias"
    edit_header(shard_of(copy, name), lambda header: header[name].update(dtype="I32"))
    assert "self_attn.dt_bias I32 [192]" in disagreeing(copy)["tensors.shapes"].found


def test_a_kind_that_is_stored_as_another_dtype_everywhere_is_not_counted_as_stored(copy: Path) -> None:
    def integers(header: Header) -> None:
        for name, entry in header.items():
            if name.endswith(".dt_bias"):
                entry["dtype"] = "I32"

    for shard in copy.glob("*.safetensors"):
        edit_header(shard, integers)
    found = disagreeing(copy)["tensors.f32"]
    assert "dt_bias" in found.expected and "dt_bias" not in found.found


def test_a_name_that_the_index_has_otherwise_is_named(copy: Path) -> None:
    def rename(document: Header) -> None:
        document["weight_map"][f"{PREFIX}2.mlp_res_norm.bias"] = document["weight_map"].pop(
            f"{PREFIX}2.mlp_res_norm.weight"
        )

    edit_json(copy / INDEX, rename)
    found = disagreeing(copy)
    assert set(found) == {"files.places"}
    assert '2.mlp_res_norm.bias" is not where' in found["files.places"].found
    assert '2.mlp_res_norm.weight" is not in the index' in found["files.places"].found


def test_a_tensor_placed_in_another_shard_is_named(copy: Path) -> None:
    name = f"{PREFIX}2.mlp_res_norm.weight"
    edit_json(copy / INDEX, lambda document: document["weight_map"].update({name: "model-00005-of-000005.safetensors"}))
    found = disagreeing(copy)
    assert set(found) == {"files.places"}
    assert "1,019 in their place" in found["files.places"].found


def test_a_total_that_is_not_the_sum_is_named(copy: Path) -> None:
    edit_json(copy / INDEX, lambda document: document["metadata"].update(total_size=5_225_601))
    found = disagreeing(copy)
    assert set(found) == {"files.tensor_bytes"}
    assert (found["files.tensor_bytes"].found, found["files.tensor_bytes"].expected) == ("5,225,601", "5,225,600")


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "model-00003-of-000005.safetensors").unlink()
    found = disagreeing(copy)
    assert found["files.shards"].found == "4 of 5; missing model-00003-of-000005.safetensors"
    assert {"tensors.total", "tensors.bound", "layers.tensors", "files.places"} <= set(found)


def test_a_config_of_another_model_is_named(copy: Path) -> None:
    """Layers 4 and 5 exchange their attention in the config only."""

    def exchange(document: Header) -> None:
        lists = document["text_config"]["linear_attn_config"]
        lists["full_attn_layers"] = [5 if layer == 4 else layer for layer in lists["full_attn_layers"]]
        lists["kda_layers"] = [4 if layer == 5 else layer for layer in lists["kda_layers"]]

    edit_json(copy / "config.json", exchange)
    found = disagreeing(copy)
    assert "(MLA: 3, 7-8)" in found["layers.attention"].found
    assert "(MLA: 4, 7-8)" in found["layers.attention"].expected
    assert "tensors.bound" in found


def test_fewer_experts_than_the_config_says_are_named(copy: Path) -> None:
    edit_json(copy / "config.json", lambda document: document["text_config"].update(num_experts=17))
    found = disagreeing(copy)
    assert (found["tensors.expert_packed"].found, found["tensors.expert_packed"].expected) == ("384", "408")


def test_a_tail_of_a_log_that_is_not_zero_is_named(copy: Path) -> None:
    def set_tail(values: np.ndarray[Any, Any]) -> None:
        values[40] = 1e-30

    write_values(copy, f"{PREFIX}5.self_attn.A_log", set_tail)
    found = disagreeing(copy)
    assert set(found) == {"a_log.tail"}
    assert found["a_log.tail"].found == "entries 3-63 are zero in 5 of 6 layers read; not in layers 5"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named(copy: Path, value: float) -> None:
    def spoil(values: np.ndarray[Any, Any]) -> None:
        values[7] = value

    write_values(copy, f"{PREFIX}2.block_sparse_moe.gate.e_score_correction_bias", spoil)
    found = disagreeing(copy)["values.finite"]
    assert "e_score_correction_bias of layer 2" in found.found
    snapshot = make_audit(DirectoryFiles(copy), AuditOptions(threads=1))
    assert "layer 2 router correction bias" not in {row.subject for row in snapshot.statistics}
    assert snapshot.probe is not None
    assert 2 not in {row.layer for row in snapshot.probe.layers}


@pytest.mark.parametrize("size", [0, 5, 8])
def test_a_file_that_is_no_shard_is_refused_with_its_folder(copy: Path, size: int) -> None:
    path = copy / "model-00002-of-000005.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Failure, match=f"{path}: found") as caught:
        audited(copy)
    assert "k3ray-audit-" not in str(caught.value)


def test_both_prefixes_are_refused(copy: Path) -> None:
    name = f"{PREFIX}2.mlp_res_norm.weight"
    edit_header(
        shard_of(copy, name), lambda header: header.update({name.removeprefix("language_model."): header.pop(name)})
    )
    with pytest.raises(Failure, match="expected one prefix throughout") as caught:
        audited(copy)
    assert str(copy) in str(caught.value)


def test_a_bad_config_is_refused_with_its_path(copy: Path) -> None:
    edit_json(copy / "config.json", lambda document: document["text_config"].update(hidden_act="silu"))
    with pytest.raises(Failure, match="hidden_act") as caught:
        audited(copy)
    assert caught.value.exit_code == 2
    assert str(copy / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "layers"), [("3", (3,)), ("0-2", (0, 1, 2)), ("7, 1-2,1", (1, 2, 7)), ("all", tuple(range(9)))]
)
def test_layers_are_understood(k3b_dir: Path, text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, read_config(k3b_dir)) == layers


@pytest.mark.parametrize("text", ["", "9", "-1", "2-1", "1-", "a", "1,,2", "0-9", "٣", "1.0", "4294967299"])
def test_other_layers_are_refused(k3b_dir: Path, text: str) -> None:
    with pytest.raises(LayerChoiceError, match="--layers: found"):
        parse_layers(text, read_config(k3b_dir))


def test_the_default_layers_are_within_the_model(k3b_dir: Path) -> None:
    config = read_config(k3b_dir)
    assert default_layers(config) == (1, 2, 4, 8)
    assert default_layers(config.truncated(1)) == (0,)


def test_a_config_that_selects_the_model_is_shown_as_it_stands(k3b_dir: Path) -> None:
    found = next(statement for statement in audited(k3b_dir).statements if statement.id == "files.config")
    assert found.agrees and found.found == found.expected
    for part in ('hidden_act "situ"', 'moe_router_activation_func "sigmoid"', "mla_use_nope true", "topk_group 1"):
        assert part in found.found
