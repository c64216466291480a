"""Reading tensors: the goldens' bytes as plain slices of the files; short reads, cut files, threads, rows."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from k3ray.workers.checkpoint import tensors as tensors_module
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader, TensorReadError, count_nan_scales

LAYERS = "language_model.model.layers."
EMBEDDING = "language_model.model.embed_tokens.weight"
WIDE = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}


def write_checkpoint(folder: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """One shard; tensors as name -> dtype, shape, bytes."""
    folder.mkdir(exist_ok=True)
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        begin, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    body = b"".join(data for _, _, data in tensors.values())
    (folder / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    return folder


@pytest.fixture
def golden(k3b_dir: Path) -> Iterator[TensorReader]:
    with TensorReader(open_index(k3b_dir, [])) as reader:
        yield reader


def plain_bytes(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a folder by plain slicing."""
    plain = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                plain[name] = (entry["dtype"], entry["shape"], data[start + begin : start + end])
    return plain


def test_every_golden_tensor_has_its_bytes(golden: TensorReader, k3b_dir: Path) -> None:
    expected = plain_bytes(k3b_dir)
    assert len(expected) == 1020
    for name, (dtype, shape, data) in expected.items():
        array = golden.read(name)
        assert array.tobytes() == data, name
        assert (array.dtype, list(array.shape)) == (WIDE[dtype], shape)


def test_memory_is_own_aligned_and_writable(golden: TensorReader) -> None:
    for name in (EMBEDDING, f"{LAYERS}0.self_attn.A_log", f"{LAYERS}1.block_sparse_moe.experts.3.w2.weight_scale"):
        array = golden.read(name)
        assert array.ctypes.data % 4096 == 0
        assert array.flags.c_contiguous
        before = golden.read(name).tobytes()
        array[...] = 0
        assert golden.read(name).tobytes() == before


def test_out_is_filled(golden: TensorReader) -> None:
    name = f"{LAYERS}1.block_sparse_moe.experts.3.w1.weight_packed"
    expected = golden.read(name)
    flat = np.full(32 * 48 + 7, 9, dtype=np.uint8)
    array = golden.read(name, flat[:-7])
    assert array.shape == (32, 48)
    assert array.base is not None
    assert np.shares_memory(array, flat)
    assert flat[:-7].tobytes() == expected.tobytes()
    assert flat[-7:].tolist() == [9] * 7


@pytest.mark.parametrize("kind", ["small", "large", "type", "strided", "readonly"])
def test_an_unfit_out_is_an_error(golden: TensorReader, kind: str) -> None:
    out = {
        "small": np.empty(32 * 48 - 1, dtype=np.uint8),
        "large": np.empty(32 * 48 + 1, dtype=np.uint8),
        "type": np.empty((32, 48), dtype=np.int8),
        "strided": np.empty((32, 96), dtype=np.uint8)[:, ::2],
        "readonly": np.empty((32, 48), dtype=np.uint8),
    }[kind]
    out.flags.writeable = kind != "readonly"
    with pytest.raises(ValueError, match="out must be writable C-contiguous uint8"):
        golden.read(f"{LAYERS}1.block_sparse_moe.experts.3.w1.weight_packed", out)


def test_rows(golden: TensorReader) -> None:
    whole = golden.read(EMBEDDING)
    for row in (0, 1, 257, 511):
        assert golden.read_row(EMBEDDING, row).tobytes() == whole[row].tobytes()
    assert golden.read_rows(EMBEDDING, 5, 12).tobytes() == whole[5:12].tobytes()
    assert golden.read_rows(EMBEDDING, 512, 512).shape == (0, 160)
    assert golden.read_row(EMBEDDING, 3).shape == (160,)
    for low, high in ((-1, 0), (512, 513), (3, 2)):
        with pytest.raises(TensorReadError, match=rf"a read of rows {low}\.\.{high}, expected rows within 0\.\.512"):
            golden.read_rows(EMBEDDING, low, high)


def test_short_reads_are_read_on(golden: TensorReader, k3b_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_bytes(k3b_dir)[EMBEDDING][2]
    whole = os.preadv
    sizes = []

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return whole(descriptor, [buffers[0][:4097]], offset)

    monkeypatch.setattr(tensors_module.os, "preadv", short)
    assert golden.read(EMBEDDING).tobytes() == expected
    assert len(sizes) == -(-len(expected) // 4097)


def test_large_reads_come_in_pieces(golden: TensorReader, k3b_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    sizes = []

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(tensors_module.os, "preadv", counted)
    monkeypatch.setattr(tensors_module, "MAX_READ_BYTES", 1000)
    assert golden.read(EMBEDDING).tobytes() == plain_bytes(k3b_dir)[EMBEDDING][2]
    assert sizes == [1000] * 163 + [840]


@pytest.mark.slow
def test_a_tensor_of_more_than_two_gib(tmp_path: Path) -> None:
    """More than Linux returns for one read (0x7ffff000 bytes); the file is sparse but for its last bytes."""
    if psutil.virtual_memory().available < 4 << 30:
        pytest.skip("needs 2 GiB of memory")
    size = 0x7FFFF000 + 12_345
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
        file.seek(-5, os.SEEK_END)
        file.write(b"hello")
    array = TensorReader(open_index(tmp_path, [])).read("a")
    assert array[-5:].tobytes() == b"hello"
    assert array.size == size
    assert not array[:: 1 << 12].any()


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {"a": ("U8", [8192], bytes(range(256)) * 32), "b": ("U8", [4], b"abcd")})
    reader = TensorReader(open_index(folder, []))
    assert reader.read("b").tobytes() == b"abcd"
    path = folder / "a.safetensors"
    os.truncate(path, path.stat().st_size - 104)
    end = path.stat().st_size
    with pytest.raises(TensorReadError) as caught:
        reader.read("a")
    start = end + 104 - 8196
    message = str(caught.value)
    assert f'{path}: tensor "a": found the file\'s end at byte {end}, expected 8192 bytes from byte {start}' in message
    assert "cut after it was indexed" in message


def test_a_file_changed_after_it_was_indexed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {"a": ("U8", [4], b"abcd")})
    index = open_index(folder, [])
    write_checkpoint(folder, {"a": ("U8", [5], b"abcde")})
    with pytest.raises(TensorReadError, match=r"a\.safetensors.*changed after it was indexed"):
        TensorReader(index).read("a")
    (folder / "a.safetensors").unlink()
    with pytest.raises(TensorReadError, match=r"a\.safetensors.*a shard that cannot be opened \(No such file"):
        TensorReader(index).read("a")


def test_a_disk_that_fails(golden: TensorReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tensors_module.os, "preadv", fail)
    with pytest.raises(TensorReadError, match=r"model-00001-of-000005.*failed at byte \d+ \(Input/output error\)"):
        golden.read(EMBEDDING)


def test_tensors_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {"a": ("Q4_K", [7], b"abcd"), "s": ("F32", [], b"\0\0\x80?")})
    reader = TensorReader(open_index(folder, []))
    with pytest.raises(TensorReadError, match='tensor "a": found dtype Q4_K, expected one of BF16, F16'):
        reader.read("a")
    with pytest.raises(TensorReadError, match='tensor "none": found no such tensor, expected one of its 2 tensors'):
        reader.read("none")
    with pytest.raises(TensorReadError, match=r"expected rows within 0\.\.0"):
        reader.read_row("s", 0)
    assert reader.read("s").shape == ()
    assert reader.read("s").item() == 1.0


def test_threads_share_a_reader(golden: TensorReader, k3b_dir: Path) -> None:
    expected = plain_bytes(k3b_dir)
    names = [name for name in expected if ".experts." in name]
    wrong = []

    def read_all(part: list[str]) -> None:
        wrong.extend(name for name in part if golden.read(name).tobytes() != expected[name][2])

    threads = [threading.Thread(target=read_all, args=(names[start:] + names[:start],)) for start in (0, 200, 400, 600)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_closed_reader_opens_again(golden: TensorReader) -> None:
    first = golden.read(EMBEDDING).tobytes()
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    golden.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files - 1
    assert golden.read(EMBEDDING).tobytes() == first


def test_nan_scales_are_counted() -> None:
    assert count_nan_scales(np.array([[0, 254, 255], [255, 1, 127]], dtype=np.uint8)) == 2


def test_a_reader_that_is_forgotten_leaves_no_file_open(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", {"a": ("F32", [2], bytes(8))})
    index = open_index(folder, [])

    def is_open() -> bool:
        return any(Path(file.path) == folder / "a.safetensors" for file in psutil.Process().open_files())

    reader = TensorReader(index)
    reader.read("a")
    assert is_open()
    del reader
    gc.collect()
    assert not is_open()
