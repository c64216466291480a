"""k3ray conform as a command: what it prints and writes, what it refuses, how it ends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from k3ray.commands.conform import ConformRequest, ConformUsage, run
from k3ray.conform.comparison import compare
from k3ray.conform.conformance import TOLERANCES, Conformance, ReferenceBroke
from k3ray.conform.inputs import InputsFailure, RecordedPrompt, Recording, random_inputs
from k3ray.conform.own_side import OwnModel
from k3ray.conform.reference import Reference, ReferenceFailure, default_reference
from k3ray.conform.report import as_json
from k3ray.prompt import PromptFailure
from tests.conforming import (
    ALL_KINDS,
    KDA_DENSE,
    reference_of,
    reports_of,
    torch_part,
)

pytest.importorskip("torch", reason="the reference is a PyTorch model: pip install 'k3ray[reference]'")


pytestmark = pytest.mark.usefixtures("bare_environment")


def request(model_dir: Path | None, **options: Any) -> ConformRequest:
    absent = ("config", "ids", "tolerance", "reference", "save_inputs", "log")
    defaults: dict[str, Any] = {
        **dict.fromkeys(absent), "layers": (), "every_layer": False, "inputs": "random", "tokens": 5, "seed": 0,
        "precision": "float64", "as_json": False,
    }  # fmt: skip
    return ConformRequest(model_dir=model_dir, **defaults | options)


def test_the_command_prints_a_line_a_layer_and_writes_a_log(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, frames = tmp_path / "conform.log", tmp_path / "frames.npz"
    run(request(model_dir, ids="3,5,7,11,13", log=log, save_inputs=frames))
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    said = [line.split()[:3] for line in lines[1:]]
    assert said == [["PASS", "layer", str(layer)] for layer in range(4)] + [["PASS", "prompt", "ids"]]
    assert "all 5 PASS" in printed.err and "next: k3ray generate" in printed.err
    text = log.read_text()
    assert text.count("attn_out ") == 4 and "float64" in text and "logits " in text and "greedy ids" in text
    with np.load(frames) as archive:
        assert {f"prefix_L{layer}" for layer in range(4)} | {f"blocks_L{layer}" for layer in range(4)} == set(archive)
        assert archive["blocks_L3"].shape == (5, 2, ALL_KINDS.hidden_size)
        entering = archive["prefix_L2"]
    run(request(model_dir, inputs=str(frames), layers=(2,), as_json=True))
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["passed"] and [report["name"] for report in record["reports"]] == ["layer 2"]
    assert record["reports"][0]["tokens"] == len(entering) and "frames.npz" in record["reports"][0]["source"]
    assert "PASS   layer 2" in printed.err, "the table goes to standard error when standard output is JSON"


def test_the_command_ends_with_1_on_a_failure(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_part("attention"), "l2_normalised", lambda v: v)
    log = tmp_path / "log"
    with pytest.raises(typer.Exit) as ending:
        run(request(model_dir, log=log, as_json=True))
    assert ending.value.exit_code == 1
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert not record["passed"] and [report["passed"] for report in record["reports"]] == [False, False, True, True]
    assert "2 of 4 FAIL: layer 0, layer 1" in printed.err and "2 of 4 FAIL" in log.read_text()


def test_a_mistake_moves_the_logits_of_a_whole_prompt(
    own: OwnModel, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = RecordedPrompt("p", [3, 5, 7, 11, 13, 17], np.empty((0, 0)))
    for mistaken in (False, True):
        if mistaken:
            monkeypatch.setattr(torch_part("attention"), "l2_normalised", lambda v: v)
        conformance = Conformance(own, reference_of(model_dir), TOLERANCES["float64"])
        inputs = partial(random_inputs, own.config, tokens=2, seed=3)
        report = list(conformance.run(range(4), inputs, [prompt]))[-1]
        assert report.kind == "whole model" and report.passed != mistaken


def test_an_infinite_error_is_null_in_json(own: OwnModel, reference: Reference) -> None:
    (report,) = reports_of(own, reference, KDA_DENSE, tokens=2)
    broken = replace(report, comparisons=(compare("x", np.full((1, 1), np.nan), np.ones((1, 1)), 1.0),))
    text = json.dumps(as_json([broken], {}), allow_nan=False)
    assert json.loads(text)["reports"][0]["comparisons"][0]["max_rel"] is None
    assert not json.loads(text)["passed"] and not as_json([], {})["passed"], "nothing compared is no pass"


@pytest.mark.parametrize(
    ("options", "failure", "words"),
    [
        ({"layers": (4,)}, ConformUsage, "--layer 4: this model has the layers 0 to 3"),
        ({"layers": (-1,)}, ConformUsage, "--layer -1"),
        ({"layers": (1,), "every_layer": True}, ConformUsage, "exclude"),
        ({"layers": (1,), "ids": "1"}, ConformUsage, "leave --layer out"),
        ({"tokens": 0}, ConformUsage, "--tokens 0"),
        ({"tokens": 513}, ConformUsage, "1 to 512"),
        ({"seed": -1}, ConformUsage, "--seed"),
        ({"precision": "bf16"}, ConformUsage, "float64 or float32"),
        ({"tolerance": -1.0}, ConformUsage, "--tolerance"),
        ({"tolerance": float("nan")}, ConformUsage, "--tolerance"),
        ({"ids": "1,x"}, PromptFailure, "'x'"),
        ({"save_inputs": Path("/tmp/x.npz")}, ConformUsage, "give --ids"),
        ({"inputs": "/nowhere.npz"}, InputsFailure, "cannot be read"),
        ({"reference": Path("/nowhere")}, ReferenceFailure, "--reference /nowhere"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    model_dir: Path, options: dict[str, Any], failure: type[Exception], words: str
) -> None:
    with pytest.raises(failure, match=words.replace("(", "\\(")) as refused:
        run(request(model_dir, **options))
    assert refused.value.exit_code == 2  # type: ignore[attr-defined]


def test_recordings_of_another_model_are_refused(own: OwnModel, k3b_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputsFailure, match=r"recorded layers \(9, 41, 160\), this model has \(4, tokens, 56\)"):
        Recording(k3b_dir / "golden.npz", own.config, own.embed).layer(0)
    path = tmp_path / "frames.npz"
    np.savez(path, prefix_L1=np.zeros((3, 56)), blocks_L1=np.zeros((3, 2, 56)))
    recording = Recording(path, own.config, own.embed)
    with pytest.raises(InputsFailure, match=r"expected \(tokens, 56\) and \(tokens, 1, 56\)"):
        recording.layer(1)
    with pytest.raises(InputsFailure, match="found no array prefix_L2"):
        recording.layer(2)
    np.savez(path, other=np.zeros(3))
    with pytest.raises(InputsFailure, match=r"found other; expected a golden\.npz"):
        Recording(path, own.config, own.embed)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"prefix_L0": np.zeros((0, 56)), "blocks_L0": np.zeros((0, 0, 56))}, "found 0 tokens"),
        ({"prefix_L0": np.zeros((3, 56)), "blocks_L0": np.zeros((3, 0, 56))}, "3 of them all zero"),
        ({"prefix_L0": np.full((3, 56), np.nan), "blocks_L0": np.zeros((3, 0, 56))}, "each finite"),
        ({"prefix_L0": np.array(["x"]), "blocks_L0": np.zeros(3)}, "arrays that cannot be a recording"),
        ({"prefix_L0": np.float32(3), "blocks_L0": np.zeros(3)}, "arrays that cannot be a recording"),
        ({"p0_ids": np.zeros(3, np.int64), "p0_layer_out": np.zeros(3)}, r"recorded layers \(3,\)"),
    ],
)
def test_a_recording_that_would_prove_nothing_is_refused(
    own: OwnModel, tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]], message: str
) -> None:
    np.savez(tmp_path / "inputs.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(InputsFailure, match=message):
        Recording(tmp_path / "inputs.npz", own.config, own.embed).layer(0)


def test_a_tolerance_that_hides_mistakes_is_said(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(request(model_dir, layers=(KDA_DENSE,), tolerance=0.3))
    assert "--tolerance 0.3 is 100000 times the usual 3e-06" in capsys.readouterr().err
    run(request(model_dir, layers=(KDA_DENSE,)))
    assert "times the usual" not in capsys.readouterr().err


def test_without_torch_one_message_says_what_to_install(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ReferenceFailure, match=r"pip install 'k3ray\[reference\]'") as refused:
        run(request(model_dir))
    assert refused.value.exit_code == 2


def test_an_installed_package_without_the_source_says_where_to_get_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (default_reference() / "model.py").is_file()
    monkeypatch.setattr("k3ray.conform.reference.default_reference", lambda: tmp_path / "scripts" / "torch_reference")
    with pytest.raises(ReferenceFailure, match=r"not part of the installed package.*--reference SOURCE"):
        run(request(model_dir))


def test_a_folder_that_is_no_reference_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_reference"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "__init__.py").write_text("raise RuntimeError('something else')")
    with pytest.raises(ReferenceFailure, match="something else"):
        run(request(model_dir, reference=tmp_path))
    assert "torch_reference" not in sys.modules


def test_the_reference_shares_no_code_with_k3ray() -> None:
    for path in default_reference().glob("*.py"):
        imported = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert imported and not [line for line in imported if "k3ray" in line], path


def test_what_was_compared_before_an_interruption_is_kept(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs_of = random_inputs

    def interrupted(config: Any, layer: int, tokens: int, seed: int) -> Any:
        if layer == 2:
            raise KeyboardInterrupt
        return inputs_of(config, layer, tokens, seed)

    monkeypatch.setattr("k3ray.commands.conform.random_inputs", interrupted)
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run(request(model_dir, log=log))
    text = log.read_text()
    assert "interrupted after 2 lines; until then" in text.splitlines()[-1] and text.count("attn_out ") == 2
    assert capsys.readouterr().out.count("PASS") == 2


def test_what_was_compared_before_the_reference_failed_is_kept(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any) -> Any:
        raise KeyError("q_b_proj")

    monkeypatch.setattr(torch_part("model"), "mla", absent)
    log = tmp_path / "log"
    with pytest.raises(ReferenceBroke, match=r"layer 2: the reference failed.*q_b_proj"):
        run(request(model_dir, log=log))
    text = log.read_text()
    assert "interrupted after 2 lines; until then" in text.splitlines()[-1] and text.count("attn_out ") == 2
