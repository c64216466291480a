"""A sequence taken out of some slices and put into others goes on with the same bits, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.cluster.plan import make_plan
from k3ray.driver import Driver
from k3ray.workers.in_process import InProcessChain, start_in_process
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model import snapshot
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.snapshot import Restoring, SnapshotDamaged, SnapshotMismatch, encode_piece, pieces_of
from k3ray.workers.model.state import KdaState, MlaState, SequenceFailure, SequenceState, new_sequence
from tests.goldens import read_golden

AFTER = [17, 401, 3]  # what is applied after the break, and read in every bit
Started = Callable[[int, int], tuple[Driver, InProcessChain]]


@pytest.fixture(scope="module")
def started(k3b_dir: Path) -> Started:
    layers = read_config(k3b_dir).num_hidden_layers

    @cache
    def start(stages: int, shards: int) -> tuple[Driver, InProcessChain]:
        plan = make_plan(CheckpointSpec(k3b_dir, None, layers), stages, shards, 1, ())
        chain = start_in_process(plan.stages, plan.shards)
        return Driver(chain, 64), chain

    return start


@pytest.fixture(scope="module")
def config(k3b_dir: Path) -> ModelConfig:
    return read_config(k3b_dir)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    """Seven rows of MLA cache in a piece."""
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 4 * 7 * (config.kv_lora_rank + config.qk_rope_head_dim))


def prompt_of(k3b_dir: Path, length: int) -> list[int]:
    golden = read_golden(k3b_dir)
    ids = [token_id for prompt in range(len(golden.prompts)) for token_id in golden.ids(prompt)]
    return (ids * (length // len(ids) + 1))[:length]


def applied(driver: Driver, session: int, ids: list[int]) -> bytes:
    return driver.forward({session: ids}, every_position=True)[session].tobytes()


def taken(chain: InProcessChain, session: int) -> list[tuple[int, pa.Buffer]]:
    return [(piece.layer, message) for piece, message in chain.snapshot(session)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("length", [1, 4, 19, 130])
def test_a_restored_sequence_goes_on_with_the_same_bits(started: Started, k3b_dir: Path, length: int) -> None:
    prompt = prompt_of(k3b_dir, length)
    unbroken, _ = started(1, 0)
    session = unbroken.open(length + len(AFTER))
    unbroken.forward({session: prompt})
    expected = applied(unbroken, session, AFTER)
    unbroken.close(session)
    for before, shards, after, more in ((3, 0, 1, 0), (1, 2, 5, 0), (2, 0, 9, 50), (9, 0, 2, 1)):
        first, chain = started(before, shards)
        session = first.open(length)
        first.forward({session: prompt})
        pieces = taken(chain, session)
        first.close(session)
        second, _ = started(after, 0)
        other = second.restore(prompt, pieces, length + len(AFTER) + more)
        found = applied(second, other, AFTER)
        second.close(other)
        assert found == expected, (before, shards, after, more)


def test_a_snapshot_is_taken_between_steps_and_changes_nothing(started: Started, k3b_dir: Path) -> None:
    driver, chain = started(2, 0)
    sessions = [driver.open(9), driver.open(9)]
    driver.forward({sessions[0]: [5, 6, 7], sessions[1]: [5, 6, 7]})
    for token_id in AFTER:
        pieces = taken(chain, sessions[0])
        again = driver.restore([0] * len(driver.committed(sessions[0])), pieces, 9)
        answers = {applied(driver, session, [token_id]) for session in [again, *sessions]}
        driver.close(again)
        assert len(answers) == 1
    for session in sessions:
        driver.close(session)


def test_a_restored_sequence_is_in_memory_of_its_own(config: ModelConfig) -> None:
    state = filled(config, 12, 8)
    messages = [encode_piece(state, piece) for piece in pieces_of(state)]
    first, second = (restored(config, messages, 20) for _ in range(2))
    for layer in state.layers:
        for values, others, source in zip(
            arrays(first, layer), arrays(second, layer), arrays(state, layer), strict=True
        ):
            rows = 8 if isinstance(state.layers[layer], MlaState) else len(source)
            assert values[:rows].tobytes() == source[:rows].tobytes() and not values[rows:].any()
            assert values.flags.writeable and values.flags.c_contiguous and not np.shares_memory(values, others)
    assert (first.position, first.capacity) == (8, 20)


def filled(config: ModelConfig, capacity: int, position: int) -> SequenceState:
    """A state of other bits everywhere, NaN payloads and denormals among them; rows not reached are rubbish too."""
    generator = np.random.default_rng(3)
    state = new_sequence(config, range(config.num_hidden_layers), capacity)
    for layer in state.layers:
        for values in arrays(state, layer):
            values.view(np.uint32)[...] = generator.integers(0, 2**32, values.shape, np.uint32)
    state.position = position
    return state


def arrays(state: SequenceState, layer: int) -> list[npt.NDArray[np.float32]]:
    part = state.layers[layer]
    if isinstance(part, KdaState):
        return [part.matrices, part.tail_q, part.tail_k, part.tail_v]
    return [part.cache]


def restored(config: ModelConfig, messages: list[pa.Buffer], capacity: int) -> SequenceState:
    restoring = Restoring(config, range(config.num_hidden_layers), capacity)
    for message in reversed(messages):
        restoring.add(message)
    return restoring.finish()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 14, 20])
def test_pieces_cover_the_rows_that_are_used_and_no_others(config: ModelConfig, position: int) -> None:
    state = filled(config, 20, position)
    pieces = pieces_of(state)
    for layer in config.mla_layers:
        rows = [row for piece in pieces if piece.layer == layer for row in range(piece.first, piece.stop)]
        assert rows == list(range(position))
        assert all(piece.stop - piece.first <= 7 for piece in pieces)
    found = restored(config, [encode_piece(state, piece) for piece in pieces], 20)
    for layer in config.mla_layers:
        assert arrays(found, layer)[0][:position].tobytes() == arrays(state, layer)[0][:position].tobytes()


def test_one_changed_value_is_refused(config: ModelConfig) -> None:
    state = filled(config, 4, 3)
    message = bytearray(memoryview(encode_piece(state, pieces_of(state)[0])))
    message[len(message) // 2] ^= 1
    with pytest.raises(SnapshotDamaged, match="cut or changed"):
        Restoring(config, range(config.num_hidden_layers), 4).add(pa.py_buffer(bytes(message)))


@settings(max_examples=150)
@given(data=st.data())
def test_a_changed_or_cut_piece_is_refused(k3b_dir: Path, data: st.DataObject) -> None:
    config = read_config(k3b_dir)
    state = filled(config, 4, 3)
    piece = data.draw(st.sampled_from(pieces_of(state)))
    message = bytearray(memoryview(encode_piece(state, piece)))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(message) - 1))
        message[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del message[data.draw(st.integers(0, len(message) - 1)) :]
    restoring = Restoring(config, range(config.num_hidden_layers), 4)
    with pytest.raises(SnapshotDamaged, match="cut or changed"):
        restoring.add(pa.py_buffer(bytes(message)))


@pytest.mark.usefixtures("small_pieces")
def test_pieces_that_are_not_one_whole_sequence(config: ModelConfig) -> None:
    state = filled(config, 20, 20)
    messages = [encode_piece(state, piece) for piece in pieces_of(state)]
    for missing in range(len(messages)):
        with pytest.raises(SnapshotDamaged, match="a piece is missing"):
            restored(config, messages[:missing] + messages[missing + 1 :], 20)
    state.position = 19
    other = encode_piece(state, pieces_of(state)[0])
    with pytest.raises(SnapshotDamaged, match="not of one moment"):
        restored(config, [*messages[1:], other], 20)


def test_a_moved_or_broken_sequence_has_no_snapshot(config: ModelConfig) -> None:
    state = filled(config, 20, 5)
    piece = pieces_of(state)[0]
    state.position = 6
    with pytest.raises(SequenceFailure, match="moved from position 5 to 6"):
        encode_piece(state, piece)
    state.broken = "a step failed half way"
    with pytest.raises(SequenceFailure, match="has no snapshot: a step failed half way"):
        pieces_of(state)


@pytest.mark.parametrize(
    ("field", "change", "expected"),
    [
        ("kda_head_dim", 2, "found matrices of shape"),
        ("kda_num_heads", 2, "found matrices of shape"),
        ("kv_lora_rank", 3, "found cache of shape"),
        ("qk_rope_head_dim", 1, "found cache of shape"),
        ("conv_kernel_size", 1, "found tail_q of shape"),
    ],
)
def test_other_widths_are_refused(config: ModelConfig, field: str, change: int, expected: str) -> None:
    state = filled(config, 4, 3)
    messages = [encode_piece(state, piece) for piece in pieces_of(state)]
    with pytest.raises(SnapshotMismatch, match=expected):
        restored(replace(config, **{field: getattr(config, field) + change}), messages, 4)


def test_other_layers_formats_and_capacities_are_refused(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    state = filled(config, 8, 5)
    messages = [encode_piece(state, piece) for piece in pieces_of(state)]
    with pytest.raises(SnapshotMismatch, match=r"layer 0 was given to layers 1\.\.3"):
        Restoring(config, range(1, 4), 8).add(messages[0])
    with pytest.raises(SnapshotMismatch, match="5 positions does not fit in the 4 positions"):
        restored(config, messages, 4)
    exchanged = list(config.mla_layers[:1]), list(config.kda_layers)
    with pytest.raises(SnapshotMismatch, match="no such array"):
        restored(replace(config, mla_layers=tuple(exchanged[1]), kda_layers=tuple(exchanged[0])), messages, 8)
    monkeypatch.setattr(snapshot, "FORMAT_VERSION", 2)
    with pytest.raises(SnapshotMismatch, match="mixed versions"):
        restored(config, messages, 8)


def test_a_session_is_restored_once_and_whole(started: Started) -> None:
    driver, chain = started(2, 0)
    session = driver.open(4)
    driver.forward({session: [5, 6]})
    pieces = taken(chain, session)
    with pytest.raises(SequenceFailure, match=f"session {session} is open already"):
        chain.restore(session, pieces, 4)
    with pytest.raises(SnapshotDamaged, match="a piece is missing"):
        driver.restore([5, 6], pieces[:-1], 4)
    with pytest.raises(SequenceFailure, match="no piece of its saved state arrived"):
        driver.restore([5, 6], [], 4)
    again = driver.restore([5, 6], pieces, 4)  # what failed left nothing behind
    assert applied(driver, again, [7]) == applied(driver, session, [7])
