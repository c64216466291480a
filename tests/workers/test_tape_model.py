"""The whole model from its tape: the resident model's logits to the bit, the official code's tokens, a failing disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.driver import Driver
from k3ray.generation import generate
from k3ray.workers.frames import ActivationFrame
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec, StageSpec, TapeSpec, load_slice
from k3ray.workers.model.slice import Slice
from k3ray.workers.tape.direct_io import DiskReadFailure
from k3ray.workers.tape.residency import DEFAULT_RING_CHUNKS
from tests.goldens import Golden, read_golden
from tests.tapes import opened_model

LAYERS = 9


@pytest.fixture(scope="module")
def golden(k3b_dir: Path) -> Golden:
    return read_golden(k3b_dir)


@pytest.fixture(scope="module")
def tape(k3b_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("tape") / "k3b"
    with opened_model(k3b_dir) as model:
        model.pack(out)
    yield out


def stage(model: Path, tape: TapeSpec | None, first: int = 0, stop: int = LAYERS, layers: int = LAYERS) -> StageSpec:
    return StageSpec(CheckpointSpec(model, None, layers), first, stop, 1, (), tape)


def forward(layers: Slice, ids: list[int], position: int) -> npt.NDArray[np.float32]:
    count = len(ids)
    frame = ActivationFrame(
        step=1,
        sessions=np.zeros(count, np.int64),
        positions=np.arange(position, position + count),
        ids=np.array(ids, np.int32),
        wants_logits=np.ones(count, np.bool_),
        prefix=np.zeros((count, 0), np.float32),
        blocks=np.zeros((count, 0, 0), np.float32),
    )
    return layers.logits(layers.forward(frame))


@pytest.mark.parametrize(("pinned", "ring"), [(0, 1), (0, 3), (40, DEFAULT_RING_CHUNKS), (10_000, 1)])
def test_logits_have_the_bits_of_the_resident_model(golden: Golden, tape: Path, pinned: int, ring: int) -> None:
    ids = golden.ids(0)
    resident = load_slice(stage(golden.path, None), []).layers
    streamed = load_slice(stage(golden.path, TapeSpec(tape, pinned, ring)), []).layers
    for layers in (resident, streamed):
        layers.open_sequence(0, len(ids))
    for low, high in ((0, 1), (1, 8), (8, 9), (9, len(ids))):
        expected = forward(resident, ids[low:high], low)
        assert forward(streamed, ids[low:high], low).tobytes() == expected.tobytes()


@pytest.mark.parametrize("cut", [1, 4])
def test_two_stages_on_one_tape_say_what_the_official_code_says(golden: Golden, tape: Path, cut: int) -> None:
    spec = TapeSpec(tape, 2, 2)
    chain = start_in_process([stage(golden.path, spec, 0, cut), stage(golden.path, spec, cut)], [])
    found = [step.token_id for step in generate(Driver(chain), golden.ids(2), 12)]
    assert found == golden.arrays["p2_greedy"].tolist()[:12]


def test_the_first_layers_alone_use_the_whole_models_tape(golden: Golden, tape: Path) -> None:
    answers = []
    for spec in (None, TapeSpec(tape, 0, 2)):
        layers = load_slice(stage(golden.path, spec, 0, 3, layers=3), []).layers
        layers.open_sequence(0, 8)
        answers.append(forward(layers, [5, 6, 7], 0).tobytes())
    assert answers[0] == answers[1]


def test_a_failing_disk_ends_the_step_and_no_later_one(
    golden: Golden, tape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = load_slice(stage(golden.path, TapeSpec(tape, 0, 2)), []).layers
    layers.open_sequence(0, 8)
    expected = forward(layers, [5, 6, 7], 0).tobytes()
    layers.close_sequence(0)
    real, calls = os.preadv, 0

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += Path(f"/proc/self/fd/{descriptor}").readlink() == tape / "trunk.tape"
        if calls == 30:
            calls += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    layers.open_sequence(0, 8)
    with pytest.raises(DiskReadFailure, match=r"trunk\.tape: found EIO"):
        forward(layers, [5, 6, 7], 0)
    layers.close_sequence(0)
    layers.open_sequence(0, 8)
    assert forward(layers, [5, 6, 7], 0).tobytes() == expected
