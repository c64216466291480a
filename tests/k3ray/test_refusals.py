"""What the command line refuses before any work: one message, the right exit code, no traceback, nothing started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from k3ray.api import open_model
from k3ray.cli import main

FIRST = ["--ids", "3,5,7"]


@pytest.fixture
def model(k3b_dir: Path, tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that a test may damage."""
    copy = tmp_path / "model"
    shutil.copytree(k3b_dir, copy, ignore=shutil.ignore_patterns("golden.*"))
    return copy


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    for name in ("K3_MODEL_DIR", "K3_TOK_FILES", "OMP_NUM_THREADS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("k3ray.starting.ray_runtime", lambda *_: pytest.fail("Ray was started for a refused command"))
    monkeypatch.setattr("sys.argv", ["k3ray", *arguments])
    with pytest.raises(SystemExit) as ending:
        main()
    output = capsys.readouterr()
    assert "Traceback" not in output.err and not output.out
    return int(ending.value.code or 0), output.err


@pytest.mark.parametrize(("options", "expected"), [
    ([], "exactly one of --prompt, --prompt-file, --ids is needed, found none"),
    ([*FIRST, "--prompt", "x"], "found --prompt and --ids"),
    (["--prompt", ""], "the prompt is empty"),
    (["--ids", ""], "item 1 is ''"),
    (["--ids", "abc"], "item 1 is 'abc'"),
    (["--ids", "3,x,5"], "item 2 is 'x'"),
    (["--ids", "3.5,7"], "item 1 is '3.5'"),
    (["--ids", ","], "item 1 is ''"),
    (["--ids", "4294967299"], "item 1 is 4294967299, expected 0 to 511"),
    (["--ids", ",".join(["1"] * 40_000)], "the prompt has 40000 tokens, expected at most 32768"),
    (["--prompt-file", "/nowhere"], "--prompt-file /nowhere: No such file"),
    ([*FIRST, "--gen", "0"], "--gen: found 0, expected 1 to 4096"),
    ([*FIRST, "--gen", "2147483647"], "--gen: found 2147483647"),
    ([*FIRST, "--gen", "abc"], "abc"),
    ([*FIRST, "--layers", "0"], "found 0, expected a number of layers from 1 to 9"),
    ([*FIRST, "--layers", "10"], "found 10, expected a number of layers from 1 to 9"),
    ([*FIRST, "--stages", "0"], "--stages: found 0, expected 1 to 9"),
    ([*FIRST, "--stages", "10"], "--stages: found 10, expected 1 to 9"),
    ([*FIRST, "--expert-shards", "-1"], "--expert-shards: found -1"),
    ([*FIRST, "--threads", "0"], "--threads: found 0"),
    ([*FIRST, "--out", "/nowhere/run.json"], "--out /nowhere/run.json: the folder /nowhere does not exist"),
    ([*FIRST, "--out", "/dev/null"], "--out /dev/null: this is a device or a pipe"),
    ([*FIRST, "--out", "/tmp/k3ray-one", "--dump-logits", "/tmp/k3ray-one"], "this is also --out; name another file"),
    ([*FIRST, "--dump-logits", "/proc"], "--dump-logits /proc: this is a folder"),
    ([*FIRST, "--tok", "/nowhere"], "--tok /nowhere"),
    ([*FIRST, "--save-state", "/nowhere/state"], "--save-state /nowhere/state: the folder /nowhere does not exist"),
    (["--load-state", "/nowhere"], "--load-state /nowhere: No such file"),
    (["--load-state", "/proc/version"], "/proc/version: found another kind of file"),
    ([*FIRST, "--config", "/nowhere.json"], "/nowhere.json"),
    ([*FIRST, "--temperature", "1"], "--temperature"),
])  # fmt: skip
def test_options(
    k3b_dir: Path,
    options: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, message = run(["generate", str(k3b_dir), *options], monkeypatch, capsys)
    assert (code, expected in message) == (2, True), message


def test_no_such_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = run(["generate", "/nowhere", *FIRST], monkeypatch, capsys)
    assert code == 2 and "model folder /nowhere" in message


def test_no_such_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = run(["genrate"], monkeypatch, capsys)
    assert code == 2 and "genrate" in message


def test_text_without_a_vocabulary(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "tiktoken.model").unlink()
    code, message = run(["generate", str(model), "--prompt", "Hello"], monkeypatch, capsys)
    assert code == 2 and "--ids" in message and "--tok" in message


@pytest.mark.parametrize(("field", "value"), [
    ("moe_router_activation_func", "softmax"),
    ("num_expert_group", 4),
    ("mla_use_nope", False),
    ("hidden_act", "silu"),
    ("tie_word_embeddings", True),
    ("num_experts_per_token", 0),
    ("num_experts_per_token", -1),
    ("num_experts_per_token", 17),
    ("rms_norm_eps", "1e-5"),
])  # fmt: skip
def test_config_values_that_would_select_another_model(
    model: Path,
    field: str,
    value: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"][field] = value
    (model / "config.json").write_text(json.dumps(config))
    code, message = run(["generate", str(model), *FIRST], monkeypatch, capsys)
    assert code == 2 and field in message and "config.json" in message


@pytest.mark.parametrize(("field", "factor"), [("moe_intermediate_size", 2), ("hidden_size", 2), ("kv_lora_rank", 2)])
def test_config_that_the_tensors_contradict(
    model: Path,
    field: str,
    factor: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"][field] *= factor
    (model / "config.json").write_text(json.dumps(config))
    code, message = run(["generate", str(model), *FIRST], monkeypatch, capsys)
    assert code == 1 and "binding the text model" in message


def test_a_missing_shard(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "model-00002-of-000005.safetensors").unlink()
    code, message = run(["generate", str(model), *FIRST], monkeypatch, capsys)
    assert code == 1 and "model-00002-of-000005.safetensors" in message


def test_a_shard_cut_short(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shard = model / "model-00003-of-000005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, message = run(["generate", str(model), *FIRST], monkeypatch, capsys)
    assert code == 1 and "model-00003-of-000005.safetensors" in message


def test_a_malformed_environment(
    k3b_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["k3ray", "generate", str(k3b_dir), *FIRST])
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2 and "OMP_NUM_THREADS=many" in capsys.readouterr().err


def test_a_field_that_is_not_known_is_told_before_a_run(model: Path, bare_environment: None) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["attn_logit_softcapping"] = 30.0
    (model / "config.json").write_text(json.dumps(config))
    lines: list[str] = []
    open_model(model, threads=1, say=lines.append).close()
    assert any(line.startswith("warning: ") and "text_config.attn_logit_softcapping" in line for line in lines)
