"""Opening a tape: damaged, cut, older and other models' tapes are refused by name; copies of the model take it."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from k3ray.commands import pack as command
from k3ray.memory import choose_tape
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.failure import Failure
from k3ray.workers.loading import CheckpointSpec, open_checkpoint
from k3ray.workers.model.config import read_config
from k3ray.workers.tape import manifest as manifest_module
from k3ray.workers.tape.direct_io import prefaulted
from k3ray.workers.tape.identity import WrongTape
from k3ray.workers.tape.manifest import TapeError, read_manifest, write_manifest
from k3ray.workers.tape.order import full_name
from k3ray.workers.tape.tape import open_tape
from k3ray.workers.tape.verify import verify
from tests.tapes import ODD_WIDTHS, Model, opened_model, synthetic_model


@pytest.fixture(scope="module")
def packed(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "tape"
    model.pack(out)
    return out


@pytest.fixture
def tape(packed: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(packed, tmp_path / "tape")


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ (1 << bit)]))


def check(model: Model, folder: Path) -> None:
    tape = model.open(folder)
    with tape.file:
        verify(tape, model.binding, model.reader, threads=2)


def test_a_good_tape_is_the_shards_to_the_last_bit(model: Model, packed: Path) -> None:
    seen: list[int] = []
    tape = model.open(packed)
    with tape.file:
        summary = verify(tape, model.binding, model.reader, progress=lambda done, total: seen.append(done))
    assert summary.tape_bytes == seen[-1] == (packed / "trunk.tape").stat().st_size
    assert summary.num_tensors == len(tape.layout.tensors)


@pytest.mark.parametrize("change", [-1, -4096, -100_000, 1, 4096])
def test_a_cut_or_longer_tape_is_refused_with_both_sizes(model: Model, tape: Path, change: int) -> None:
    size = (tape / "trunk.tape").stat().st_size
    os.truncate(tape / "trunk.tape", size + change)
    with pytest.raises(TapeError, match=rf"trunk\.tape: found {size + change} bytes, expected {size}") as caught:
        model.open(tape)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["trunk.tape", "manifest.json"])
def test_half_a_tape_is_refused(model: Model, tape: Path, name: str) -> None:
    (tape / name).unlink()
    with pytest.raises(TapeError, match=name):
        model.open(tape)


def test_a_folder_that_is_no_tape_is_refused(model: Model) -> None:
    with pytest.raises(TapeError, match="expected the folder that `k3ray pack` made"):
        model.open(model.path)


def test_every_flipped_bit_of_the_manifest_is_noticed(model: Model, tape: Path) -> None:
    path = tape / "manifest.json"
    size = path.stat().st_size
    places = random.Random(5)
    for _ in range(300):
        byte, bit = places.randrange(size), places.randrange(8)
        flip(path, byte, bit)
        with pytest.raises(TapeError):
            read_manifest(tape)
        flip(path, byte, bit)
    read_manifest(tape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "found a tape of version 2, expected version 1 of this k3ray"),
        ({"format": "another"}, "found format 'another'"),
        ({"unknown": 1}, "damaged"),
        ({"checksums": "none"}, "damaged"),
        ({"made_by": "9.9.9"}, "was changed"),
    ],
)
def test_another_manifest_is_refused(tape: Path, change: dict[str, object], message: str) -> None:
    path = tape / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TapeError, match=message):
        read_manifest(tape)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff\xfe", b"{" * 100_000, b'{"format": 3}'])
def test_any_text_for_a_manifest_is_refused(tape: Path, text: bytes) -> None:
    (tape / "manifest.json").write_bytes(text)
    with pytest.raises(TapeError, match="damaged"):
        read_manifest(tape)


@pytest.mark.parametrize("field", ["layout", "total_bytes", "samples", "checksums"])
def test_a_tape_laid_out_otherwise_is_refused(model: Model, tape: Path, field: str) -> None:
    manifest = read_manifest(tape)
    identity, checksums = manifest.identity, manifest.checksums
    if field == "checksums":
        checksums = checksums[:-1]
    else:
        other = {"layout": "0" * 32, "total_bytes": 4096, "samples": identity.samples[:-1]}[field]
        identity = msgspec.structs.replace(identity, **{field: other})
    write_manifest(tape, identity, checksums)
    with pytest.raises(TapeError, match="as this k3ray lays the model out"):
        model.open(tape)


@pytest.mark.parametrize("place", [0.0, 0.31, 0.62, 0.97])
def test_a_flipped_bit_of_the_tape_is_found_and_named(model: Model, tape: Path, place: float) -> None:
    opened = model.open(tape)
    opened.file.close()
    layout = opened.layout
    chunk = layout.chunks[int(place * len(layout.chunks))]
    segment = chunk.segments[0]
    tensor = layout.tensors[segment.tensor]
    byte = chunk.offset + segment.offset + tensor.row_bytes + 3  # in the segment's second row
    flip(tape / "trunk.tape", byte, 6)
    expected = rf"at byte {byte} \({full_name(model.binding, tensor)}, row {segment.first_row + 1}\)"
    with pytest.raises(TapeError, match=expected):
        check(model, tape)


def test_a_flipped_bit_of_the_padding_is_found(model: Model, tape: Path) -> None:
    opened = model.open(tape)
    opened.file.close()
    layout = opened.layout
    for chunk in layout.chunks:
        last = chunk.segments[-1]
        end = last.offset + last.rows * layout.tensors[last.tensor].row_bytes
        if end < chunk.nbytes:
            break
    flip(tape / "trunk.tape", chunk.offset + end)
    with pytest.raises(TapeError, match=rf"at byte {chunk.offset + end} \(padding\)"):
        check(model, tape)


def test_a_checksum_that_is_not_the_bytes_is_found(model: Model, tape: Path) -> None:
    manifest = read_manifest(tape)
    write_manifest(tape, manifest.identity, [manifest.checksums[0] ^ 1, *manifest.checksums[1:]])
    with pytest.raises(TapeError, match="of chunk 0 in the manifest"):
        check(model, tape)


def test_a_tape_of_another_config_names_the_fields(packed: Path, tmp_path: Path) -> None:
    with opened_model(synthetic_model(tmp_path / "other", ODD_WIDTHS)) as other:
        with pytest.raises(WrongTape, match=r"another model \(k3b\).*hidden_size 160 \(here 55\)") as caught:
            other.open(packed)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(("field", "value"), [("rms_norm_eps", 2e-5), ("num_experts_per_token", 3)])
def test_a_config_that_computes_otherwise_is_another_model(
    model: Model, packed: Path, field: str, value: float
) -> None:
    binding = replace(model.binding, config=replace(model.binding.config, **{field: value}))
    with pytest.raises(WrongTape, match=rf"its config has {field} .* \(here {value}\)\."):
        open_tape(packed, binding, model.reader, [])


def test_another_end_of_text_is_the_same_model(model: Model, packed: Path) -> None:
    binding = replace(model.binding, config=replace(model.binding.config, eos_token_id=(1, 2)))
    open_tape(packed, binding, model.reader, [0]).file.close()


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of the same widths and names, the same file sizes and headers, from two seeds; a tape of one."""
    folder = tmp_path_factory.mktemp("twins")
    synthetic_model(folder / "first", SyntheticSpec(), seed=1)
    synthetic_model(folder / "second", SyntheticSpec(), seed=2)
    with opened_model(folder / "first") as first:
        first.pack(folder / "tape")
    return folder


def test_the_same_widths_with_other_weights_are_refused(twins: Path) -> None:
    with opened_model(twins / "first") as first, opened_model(twins / "second") as second:
        assert first.reader.index.fingerprint == second.reader.index.fingerprint
        first.open(twins / "tape").file.close()
        with pytest.raises(WrongTape, match=r"another model \(first\) than .*second.*layer 0's .* has other values"):
            second.open(twins / "tape")


@pytest.mark.parametrize("row", [0, -1])
def test_one_changed_row_at_a_matrix_end_is_enough(twins: Path, tmp_path: Path, row: int) -> None:
    path = shutil.copytree(twins / "first", tmp_path / "changed")
    with opened_model(path) as changed:
        entry = changed.reader.entry("language_model.lm_head.weight")
        row_bytes = entry.nbytes // entry.shape[0]
        flip(entry.path, entry.offset + (row % entry.shape[0]) * row_bytes + 7)
    with opened_model(path) as changed, pytest.raises(WrongTape, match="the head has other values"):
        changed.open(twins / "tape")


def test_a_copy_in_other_shards_takes_the_tape(twins: Path, tmp_path: Path) -> None:
    spec = replace(SyntheticSpec(), sharding="packed", packed_shards=4)
    with opened_model(synthetic_model(tmp_path / "copy", spec, seed=1)) as copy:
        check(copy, twins / "tape")


def test_the_command_packs_proves_and_says_what_is_next(
    twins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = twins / "first", tmp_path / "tape"
    command.run(model, out, False)
    command.run(model, out, True)
    lines = capsys.readouterr().err.splitlines()
    assert "wrote" in lines[1] and "GB/s" in lines[1] and f"--tape {out}" in lines[1]
    assert "to the last bit" in lines[-1] and f"next: k3ray generate {model} --tape {out}" in lines[-1]
    command.run(model, out, False)
    assert "nothing was written" in capsys.readouterr().err
    with pytest.raises(WrongTape):
        command.run(twins / "second", out, False)
    flip(out / "trunk.tape", 4000)
    with pytest.raises(Failure, match="byte 4000"):
        command.run(model, out, True)


def test_shards_that_were_written_after_the_tape_are_told_until_it_is_proven(
    twins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row between the samples that was repaired after packing: only a proof finds it, so a proof is asked for."""
    path, out = shutil.copytree(twins / "first", tmp_path / "model"), tmp_path / "tape"
    spec = CheckpointSpec(path, None, read_config(path).num_hidden_layers)
    command.run(path, out, False)
    lines: list[str] = []
    choose_tape(open_checkpoint(spec), out, lines.append)
    assert not any("warning" in line for line in lines)
    with opened_model(path) as model:
        entry = model.reader.entry("language_model.lm_head.weight")
    flip(entry.path, entry.offset + entry.nbytes // entry.shape[0] + 7)  # of row 1, which is in no sample
    later = (out / "manifest.json").stat().st_mtime_ns + 10**9
    os.utime(entry.path, ns=(later, later))
    choose_tape(open_checkpoint(spec), out, lines.append)
    assert f"shards, {entry.path.name} for one, were written after this tape was packed or proven" in "\n".join(lines)
    command.run(path, out, False)
    assert "warning: " in capsys.readouterr().err
    with pytest.raises(TapeError, match=r"lm_head.weight, row 1"):
        command.run(path, out, True)
    flip(entry.path, entry.offset + entry.nbytes // entry.shape[0] + 7)
    os.utime(entry.path)
    command.run(path, out, True)
    told = len(lines)
    choose_tape(open_checkpoint(spec), out, lines.append)
    assert not any("warning" in line for line in lines[told:])


def test_the_version_is_known_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise manifest_module.PackageNotFoundError(name)

    monkeypatch.setattr(manifest_module, "version", absent)
    assert manifest_module._our_version() == "unknown"


def test_a_flipped_bit_anywhere_breaks_its_chunks_checksum(model: Model, tape: Path) -> None:
    opened = model.open(tape)
    with opened.file:
        slot = prefaulted(opened.layout.chunk_bytes)
        for number, chunk in enumerate(opened.layout.chunks):
            opened.read(number, slot, check=True)
            flip(tape / "trunk.tape", chunk.offset + chunk.nbytes - 1, number % 8)
            with pytest.raises(TapeError, match=rf"chunk {number} \(layer {chunk.layer}, bytes {chunk.offset}"):
                opened.read(number, slot, check=True)
