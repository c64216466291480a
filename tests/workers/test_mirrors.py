"""A mirror is a copy of the same model, however it is cut; one of other weights is refused before it is needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from k3ray.api import open_model
from k3ray.workers.checkpoint.mirrors import OtherMirror, refuse_other_experts
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from tests.parts import cut_by_layers
from tests.tapes import opened_model, synthetic_model

SPEC = SyntheticSpec(num_hidden_layers=4)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_model(tmp_path_factory.mktemp("first") / "model", SPEC)


def test_a_copy_in_other_shards_is_a_mirror(first: Path, tmp_path: Path) -> None:
    copy = cut_by_layers(first, tmp_path / "copy")
    with opened_model(first) as one, opened_model(copy) as other:
        refuse_other_experts((one.binding, one.reader), (other.binding, other.reader))
    open_model(first, mirror=[copy], threads=1).close()


def test_other_weights_of_the_same_widths_are_refused(first: Path, tmp_path: Path) -> None:
    other = synthetic_model(tmp_path / "other", SPEC, seed=2)
    with pytest.raises(
        OtherMirror, match=r"--mirror .*other: found other values .* in row \d+ of layer 1 expert 1's w1"
    ):
        open_model(first, mirror=other, threads=1)  # one folder need not be in a list


def test_other_experts_of_one_layer_are_refused(first: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(first, other)
    with opened_model(other) as model:
        name = model.binding.expert_tensors(3, 3)["w2.weight_scale"]
        entry = model.reader.entry(name)
    with entry.path.open("r+b") as file:
        file.seek(entry.offset)
        data = file.read(entry.nbytes)
        file.seek(entry.offset)
        file.write(bytes(byte ^ 1 for byte in data))
    with pytest.raises(OtherMirror, match=r"layer 3 expert 3's w2\.weight_scale"):
        open_model(first, mirror=[other], threads=1)


def test_what_cannot_be_read_is_what_mirrors_are_for(first: Path, tmp_path: Path) -> None:
    copy = cut_by_layers(first, tmp_path / "copy")
    with opened_model(first) as one, opened_model(copy) as other:
        for shard in copy.glob("*.safetensors"):
            shard.unlink()
        refuse_other_experts((one.binding, one.reader), (other.binding, other.reader))
        refuse_other_experts((other.binding, other.reader), (one.binding, one.reader))
