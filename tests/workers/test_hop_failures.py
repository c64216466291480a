"""A Failure crosses a hop with its class, message, attributes and exit code; nothing that was sent is executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.workers.experts import MissingExpert
from k3ray.workers.failure import Failure
from k3ray.workers.hop_failures import ShardFailure, decode_failure, encode_failure
from k3ray.workers.shard_link import ShardGone


class Particular(Failure):
    """A failure whose constructor takes other things than a message."""

    exit_code = 4

    def __init__(self, path: Path, layer: int) -> None:
        self.path = path
        self.layer = layer
        self.tried = [path, None]
        super().__init__(f"{path}: layer {layer}")


def crossed(error: BaseException) -> Failure:
    return decode_failure(encode_failure(error))


@pytest.mark.parametrize("error", [MissingExpert("layer 3 expert 5: äöü 中文"), ShardGone("killed"), Failure("plain")])
def test_class_message_and_exit_code(error: Failure) -> None:
    found = crossed(error)
    assert (type(found), str(found), found.exit_code) == (type(error), str(error), error.exit_code)


def test_a_constructor_with_other_arguments_and_attributes() -> None:
    found = crossed(Particular(Path("/model/a.safetensors"), 7))
    assert isinstance(found, Particular)
    assert (str(found), found.exit_code) == ("/model/a.safetensors: layer 7", 4)
    assert (found.path, found.layer, found.tried) == ("/model/a.safetensors", 7, ["/model/a.safetensors", None])
    assert str(pickle.loads(pickle.dumps(found))) == str(found)  # and on to the driver, by Ray


def test_an_exit_code_of_one_object_crosses() -> None:
    error = Failure("with its own")
    error.exit_code = 4
    assert crossed(error).exit_code == 4


def test_a_class_that_is_not_known_here_keeps_message_and_exit_code() -> None:
    record = {"class": "os.system", "message": "found x, expected y", "exit_code": 3, "attributes": {}}
    found = decode_failure(pa.py_buffer(json.dumps(record).encode()))
    assert (type(found), str(found), found.exit_code) == (ShardFailure, "found x, expected y", 3)


def test_what_is_no_failure_says_what_it_was() -> None:
    found = crossed(ZeroDivisionError("division by zero"))
    assert isinstance(found, ShardFailure)
    assert "ZeroDivisionError: division by zero" in str(found)


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
    lambda value: json.dumps({"class": value, "message": value, "exit_code": value, "attributes": value}).encode()
))  # fmt: skip
def test_whatever_arrives_is_a_failure(message: bytes) -> None:
    assert isinstance(decode_failure(pa.py_buffer(message)), Failure)
