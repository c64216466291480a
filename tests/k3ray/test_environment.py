"""The environment is understood or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3ray.environment import Environment, EnvironmentFailure, read_environment


def test_unset_and_empty_are_none() -> None:
    nothing = Environment(None, None, None, None)
    assert read_environment({}) == nothing
    assert (
        read_environment(dict.fromkeys(["K3_MODEL_DIR", "K3_TOK_FILES", "OMP_NUM_THREADS", "RAY_ADDRESS"], ""))
        == nothing
    )


def test_values(tmp_path: Path) -> None:
    variables = {
        "K3_MODEL_DIR": str(tmp_path),
        "K3_TOK_FILES": str(tmp_path),
        "OMP_NUM_THREADS": "3",
        "RAY_ADDRESS": "a:1",
    }
    assert read_environment(variables) == Environment(tmp_path, tmp_path, 3, "a:1")


@pytest.mark.parametrize("text", ["0", "-1", "two", "2.0", "1,2", " 2", "٢", "99999"])
def test_malformed_threads(text: str) -> None:
    with pytest.raises(EnvironmentFailure, match=r"OMP_NUM_THREADS=.*expected a number from 1 to 4096"):
        read_environment({"OMP_NUM_THREADS": text})


@pytest.mark.parametrize("name", ["K3_MODEL_DIR", "K3_TOK_FILES"])
def test_paths_must_exist(name: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"{name}=/nowhere/at/all: there is no such file"):
        read_environment({name: "/nowhere/at/all"})


def test_a_range_of_ports() -> None:
    assert read_environment({"K3RAY_PORTS": "20000-20099"}).ports == (20_000, 20_099)
    assert read_environment({"K3RAY_PORTS": "20000"}).ports == (20_000, 20_000)
    assert read_environment({"K3RAY_PORTS": ""}).ports is None


@pytest.mark.parametrize("text", ["x", "20000-", "-20000", "20000-y", "20099-20000", "80-90", "1-2-3", "0-65536", "٢"])
def test_malformed_ports(text: str) -> None:
    with pytest.raises(EnvironmentFailure, match="K3RAY_PORTS="):
        read_environment({"K3RAY_PORTS": text})


def test_a_token_is_taken_and_never_shown() -> None:
    found = read_environment({"HF_TOKEN": " hf_secret\n", "HF_ENDPOINT": "https://mirror.example/"})
    assert (found.hf_token, found.hf_endpoint) == ("hf_secret", "https://mirror.example")
    assert "hf_secret" not in repr(found)


def test_a_malformed_token_is_refused_without_showing_it() -> None:
    with pytest.raises(EnvironmentFailure, match="HF_TOKEN") as caught:
        read_environment({"HF_TOKEN": "hf_se cret"})
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["huggingface.co", "ftp://a", "https://", "https://u:pw@a", "https://a?b", "http://[x", "http://a b"]
)
def test_an_endpoint_is_an_address(text: str) -> None:
    with pytest.raises(EnvironmentFailure, match=r"HF_ENDPOINT: expected a hub's address") as caught:
        read_environment({"HF_ENDPOINT": text})
    assert "pw" not in str(caught.value)


def test_where_sequences_are_rescued_to(tmp_path: Path) -> None:
    assert read_environment({"XDG_STATE_HOME": str(tmp_path)}).rescue_folder == tmp_path / "k3ray"
    assert read_environment({}).rescue_folder == Path.home() / ".local" / "state" / "k3ray"
    with pytest.raises(EnvironmentFailure, match="XDG_STATE_HOME=here: expected a path that begins with /"):
        read_environment({"XDG_STATE_HOME": "here"})
