"""The messages between processes: activations and logits as Arrow record batches, read in place.

An array taken from a received frame is read-only and lives only as long as the message: copy what must be kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.workers.failure import Failure

FORMAT = "k3ray-1"
STEP_TOKENS = 64  # of a sequence in one step: bounds a frame at the released model's end to 64 x 258 KB

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Damaged = tuple[tuple[int, int], ...]


class FrameError(Failure):
    """A message that is not what its reader expects."""


@dataclass(frozen=True, slots=True)
class ActivationFrame:
    """What flows from stage to stage for one step.

    Rows are tokens; the tokens of one session stand together, at consecutive positions.
    step: the driver's number of this step. sessions, positions, ids: (tokens,). wants_logits: (tokens,) bool.
    prefix: (tokens, hidden) f32, the running sum p; zero columns before the first stage has embedded the ids.
    blocks: (tokens, num_blocks, hidden) f32, the finished AttnRes blocks B. damaged: (layer, expert) of the experts
    with a NaN scale byte that this step has used so far: it travels with the step, so that no death can hide it.
    """

    step: int
    sessions: Int64Array
    positions: Int64Array
    ids: Int32Array
    wants_logits: BoolArray
    prefix: Float32Array
    blocks: Float32Array
    damaged: Damaged = ()

    def segments(self) -> list[tuple[int, int, int]]:
        """Return (session, first row, row after the last) for every session; refuse rows that are out of order."""
        cuts = [0, *(np.flatnonzero(np.diff(self.sessions)) + 1).tolist(), len(self.sessions)]
        found = [(int(self.sessions[low]), low, high) for low, high in itertools.pairwise(cuts)]
        if len({session for session, _, _ in found}) != len(found):
            raise FrameError(f"step {self.step}: the tokens of one session do not stand together: {self.sessions}")
        for session, low, high in found:
            if (np.diff(self.positions[low:high]) != 1).any():
                positions = self.positions[low:high].tolist()
                raise FrameError(f"step {self.step}: session {session} has positions {positions}, not consecutive ones")
        return found


@dataclass(frozen=True, slots=True)
class LogitsFrame:
    """What the last stage answers: logits (rows, vocab) f32 of the tokens that wanted them, with where they belong.

    damaged: see ActivationFrame.
    """

    step: int
    sessions: Int64Array
    positions: Int64Array
    logits: Float32Array
    damaged: Damaged = ()


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """Work for the experts of one layer.

    latents: (rows, latent) f32, one row a token. offsets: (rows + 1,) int32; experts: (pairs,) int32: row r asks for
    experts[offsets[r]:offsets[r + 1]], and these pairs, in this order, are the rows of the reply.
    """

    layer: int
    latents: Float32Array
    offsets: Int32Array
    experts: Int32Array

    def token_rows(self) -> Int32Array:
        """Return (pairs,) int32: the latent row of every pair."""
        return np.repeat(np.arange(len(self.latents), dtype=np.int32), np.diff(self.offsets))


@dataclass(frozen=True, slots=True)
class ExpertReply:
    """outputs: (pairs, latent) f32, in the request's order. damaged: the experts asked for that have a NaN scale."""

    layer: int
    outputs: Float32Array
    damaged: tuple[int, ...] = ()


def encode_activations(frame: ActivationFrame) -> pa.Buffer:
    """Return the frame as one Arrow IPC message."""
    columns = {
        "session": pa.array(frame.sessions),
        "position": pa.array(frame.positions),
        "id": pa.array(frame.ids),
        "wants_logits": pa.array(frame.wants_logits.view(np.uint8)),
    }
    tokens = len(frame.ids)
    if frame.prefix.size:
        columns["prefix"] = _rows(frame.prefix)
    if frame.blocks.size:
        columns["blocks"] = _rows(frame.blocks.reshape(tokens, -1))
    numbers = {"step": frame.step, "num_blocks": frame.blocks.shape[1], "hidden": frame.prefix.shape[1]}
    return _write("activations", numbers, columns, _pairs_text(frame.damaged))


def decode_activations(message: pa.Buffer) -> ActivationFrame:
    """Return the frame over the message's own memory; FrameError when it is another kind of message."""
    batch, numbers, damaged = _read("activations", message)
    return ActivationFrame(
        step=numbers["step"],
        sessions=_values(batch, "session"),
        positions=_values(batch, "position"),
        ids=_values(batch, "id"),
        wants_logits=_values(batch, "wants_logits").view(np.bool_),
        prefix=_row_values(batch, "prefix", (numbers["hidden"],)),
        blocks=_row_values(batch, "blocks", (numbers["num_blocks"], numbers["hidden"])),
        damaged=_pairs(damaged),
    )


def encode_logits(frame: LogitsFrame) -> pa.Buffer:
    """Return the answer as one Arrow IPC message."""
    columns = {
        "session": pa.array(frame.sessions),
        "position": pa.array(frame.positions),
        "logits": _rows(frame.logits),
    }
    return _write("logits", {"step": frame.step, "vocab": frame.logits.shape[1]}, columns, _pairs_text(frame.damaged))


def decode_logits(message: pa.Buffer) -> LogitsFrame:
    """Return the answer over the message's own memory; FrameError when it is another kind of message."""
    batch, numbers, damaged = _read("logits", message)
    return LogitsFrame(
        step=numbers["step"],
        sessions=_values(batch, "session"),
        positions=_values(batch, "position"),
        logits=_row_values(batch, "logits", (numbers["vocab"],)),
        damaged=_pairs(damaged),
    )


def encode_expert_request(request: ExpertRequest) -> pa.Buffer:
    """Return the request as one Arrow IPC message; a token's latent travels once, however many experts it asks."""
    experts = pa.ListArray.from_arrays(pa.array(request.offsets), pa.array(request.experts))
    numbers = {"layer": request.layer, "latent": request.latents.shape[1]}
    return _write("experts", numbers, {"experts": experts, "latent": _rows(request.latents)})


def decode_expert_request(message: pa.Buffer) -> ExpertRequest:
    """Return the request over the message's own memory; FrameError when it is another kind of message."""
    batch, numbers, _ = _read("experts", message)
    asked = batch.column("experts")
    return ExpertRequest(
        layer=numbers["layer"],
        latents=_row_values(batch, "latent", (numbers["latent"],)),
        offsets=asked.offsets.to_numpy(),
        experts=asked.values.to_numpy(),
    )


def encode_expert_reply(reply: ExpertReply) -> pa.Buffer:
    """Return the outputs as one Arrow IPC message."""
    numbers = {"layer": reply.layer, "latent": reply.outputs.shape[1]}
    return _write("outputs", numbers, {"output": _rows(reply.outputs)}, " ".join(map(str, reply.damaged)))


def decode_expert_reply(message: pa.Buffer) -> ExpertReply:
    """Return the outputs over the message's own memory; FrameError when it is another kind of message."""
    batch, numbers, damaged = _read("outputs", message)
    outputs = _row_values(batch, "output", (numbers["latent"],))
    return ExpertReply(numbers["layer"], outputs, tuple(map(int, damaged.split())))


def _rows(values: Float32Array) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])


def _pairs_text(damaged: Damaged) -> str:
    return " ".join(f"{layer} {expert}" for layer, expert in damaged)


def _pairs(text: str) -> Damaged:
    numbers = list(map(int, text.split()))
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _write(kind: str, numbers: Mapping[str, int], columns: Mapping[str, pa.Array], damaged: str = "") -> pa.Buffer:
    metadata = {"format": FORMAT, "kind": kind, **{name: str(value) for name, value in numbers.items()}}
    if damaged:  # hardly ever: a message of a sound model has the bytes that it would have without
        metadata["damaged"] = damaged
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    batch = batch.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _read(kind: str, message: pa.Buffer) -> tuple[pa.RecordBatch, dict[str, int], str]:
    try:
        batch = pa.ipc.open_stream(message).read_next_batch()
    except (pa.ArrowInvalid, StopIteration) as error:
        raise FrameError(
            f"expected a k3ray message of kind {kind}, found {message.size} bytes that are none"
        ) from error
    metadata = {name.decode(): text.decode() for name, text in (batch.schema.metadata or {}).items()}
    found = metadata.get("format"), metadata.get("kind")
    if found != (FORMAT, kind):
        raise FrameError(f"expected a message of format {FORMAT} and kind {kind}, found {found}: mixed versions?")
    numbers = {name: int(text) for name, text in metadata.items() if name not in ("format", "kind", "damaged")}
    return batch, numbers, metadata.get("damaged", "")


def _values(batch: pa.RecordBatch, name: str) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = batch.column(name).to_numpy()
    return values


def _row_values(batch: pa.RecordBatch, name: str, shape: tuple[int, ...]) -> Float32Array:
    if name not in batch.schema.names:
        return np.zeros((batch.num_rows, *shape), np.float32)
    values: Float32Array = batch.column(name).values.to_numpy()
    return values.reshape(batch.num_rows, *shape)
