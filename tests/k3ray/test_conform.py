"""Conformance with the PyTorch reference: what agrees passes, and every mistake put in on either side is seen."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from k3ray import conform_reference
from k3ray.commands.conform import ConformRequest, ConformUsage, run
from k3ray.conform import TOLERANCES, Conformance, LayerReport
from k3ray.conform_compare import compare, compare_all, cut, judge_choice, settle_ties, spans
from k3ray.conform_inputs import InputsFailure, RecordedPrompt, Recording, random_inputs
from k3ray.conform_own import OwnModel
from k3ray.conform_reference import Reference, ReferenceFailure, default_reference, open_reference
from k3ray.conform_report import as_json, conclusion, log_lines
from k3ray.prompt import PromptFailure
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from tests.goldens import read_golden
from tests.tapes import synthetic_model

pytest.importorskip("torch", reason="the reference is a PyTorch model: pip install 'k3ray[reference]'")

# every kind of layer, a block that begins at an MLA layer, widths that are no multiple of 16
ALL_KINDS = SyntheticSpec(num_hidden_layers=4, mla_layers=(2, 3), hidden_size=56, q_lora_rank=24, kv_lora_rank=20)
KDA_DENSE, KDA_MOE, MLA_MOE, LAST = range(4)
TOKENS = 9


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("K3_MODEL_DIR", "K3_TOK_FILES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_model(tmp_path_factory.mktemp("conform") / "model", ALL_KINDS)


@pytest.fixture(scope="module")
def own(model_dir: Path) -> OwnModel:
    return OwnModel(model_dir, None, 2)


def reference_of(path: Path, precision: str = "float64") -> Reference:
    return open_reference(None, path, path / "config.json", precision, 1)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return reference_of(model_dir)


def reports_of(
    own: OwnModel, reference: Reference, *layers: int, tokens: int = TOKENS, precision: str = "float64"
) -> list[LayerReport]:
    conformance = Conformance(own, reference, TOLERANCES[precision])
    inputs = partial(random_inputs, own.config, tokens=tokens, seed=3)
    return list(conformance.run(layers, inputs, []))


def failed_arrays(report: LayerReport) -> list[str]:
    return [found.name for found in report.failures]


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_every_kind_of_layer_agrees(own: OwnModel, model_dir: Path, precision: str) -> None:
    reports = reports_of(own, reference_of(model_dir, precision), *range(4), precision=precision)
    assert [report.kind for report in reports] == ["KDA + dense", "KDA + MoE", "MLA + MoE", "MLA + MoE"]
    for report in reports:
        assert report.passed, log_lines(report)
        assert report.tokens == TOKENS and report.pieces == (4, 1, 1, 3)
        names = {found.name for found in report.comparisons}
        state = {"cache_latent", "cache_shared"} if "MLA" in report.kind else {"matrices", "tail_q", "tail_k", "tail_v"}
        assert state | {"attn_in", "attn_out", "mlp_out", "layer_out", "blocks"} <= names
        assert (report.experts is not None) == ("MoE" in report.kind)
    assert all(found.max_rel < 3e-6 or precision == "float32" for report in reports for found in report.comparisons)


@pytest.mark.parametrize("name", ["k3a", "k3b"])
def test_goldens_layer_by_layer_and_whole(name: str, request: pytest.FixtureRequest) -> None:
    """Ours against the reference, and both against what the official code recorded."""
    path = request.getfixturevalue(f"{name}_dir")
    own = OwnModel(path, None, 2)
    recording = Recording(path / "golden.npz", own.config, own.embed)
    prompts = recording.prompts()
    assert len(prompts) == 4
    conformance = Conformance(own, reference_of(path), TOLERANCES["float64"])
    count = own.config.num_hidden_layers
    reports = list(conformance.run(range(count), recording.layer, prompts[2:3]))  # the shortest
    assert len(reports) == count + 1 and all(report.passed for report in reports), conclusion(reports)
    recorded = [found for report in reports for found in report.comparisons if found.against == "recorded"]
    per_layer = [found.name for found in recorded]
    assert per_layer.count("attn_out") == per_layer.count("layer_out") == count
    assert per_layer.count("expert ids") == count - 1 and per_layer.count("matrices") == 3
    assert per_layer.count("latent_aggregate") == per_layer.count("shared_out") == 2 and per_layer.count("logits") == 1
    assert reports[-1].tokens == len(read_golden(path).ids(2)) + 31, "the continuation is compared, too"


def test_a_sequence_in_pieces_and_the_tokens_a_report_names(own: OwnModel, reference: Reference) -> None:
    for tokens in (1, 2, 3, 20):
        (report,) = reports_of(own, reference, KDA_MOE, tokens=tokens)
        assert report.passed and sum(report.pieces) == tokens


@given(st.integers(1, 600))
def test_the_cut_covers_every_token_once(tokens: int) -> None:
    pieces = cut(tokens)
    rows = [row for span in spans(pieces) for row in range(span.start, span.stop)]
    assert rows == list(range(tokens)) and all(pieces)
    assert tokens < 2 or len(pieces) > 1, "no state would be carried"


# --- mistakes in the reference: as far away as the same mistakes on our side


def torch_part(name: str) -> Any:
    return importlib.import_module(f"torch_reference.{name}")


def swapped_nibbles(packed: Any, scales: Any, x: Any) -> Any:
    return torch_part("arithmetic").matmul_mxfp4((packed >> 4) | ((packed & 15) << 4), scales, x)


def doubled_scale(packed: Any, scales: Any, x: Any) -> Any:
    return torch_part("arithmetic").matmul_mxfp4(packed, scales + 1, x)


def biased_scores(read: Any, x: Any) -> Any:
    selection = torch_part("feed_forward").scores_of(read, x)[1]
    return selection, selection


def exchanged_situ(gate: Any, up: Any, beta: float, linear_beta: float) -> Any:
    return torch_part("arithmetic").situ(up, gate, beta, linear_beta)


def normed_rows(blocks: Any, prefix: Any, norm: Any, projection: Any, eps: float) -> Any:
    import torch

    arithmetic = torch_part("arithmetic")
    rows = torch.cat([blocks, prefix[:, None]], dim=1)
    scores = arithmetic.rms_norm(rows, norm, eps) @ projection.reshape(-1).to(rows.dtype)
    ones = torch.ones(rows.shape[-1])
    return torch.einsum("tn,tnd->td", torch.softmax(scores, 1), arithmetic.rms_norm(rows, ones, eps))


def late_read(matrices: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
    """The delta is read before the decay instead of after it."""
    import torch

    s, outputs = matrices, []
    for t in range(len(q)):
        u = torch.einsum("hkv,hk->hv", s, k[t])
        s = s * torch.exp(log_decay[t])[:, :, None]
        s = s + k[t][:, :, None] * (beta[t][:, None] * (v[t] - u))[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", s, q[t]))
    return torch.stack(outputs), s


# (what is wrong, module, name, what stands there instead, layer, the first array that must be beyond tolerance)
MISTAKES: list[tuple[str, str, str, Any, int, str]] = [
    ("no L2 norm of q and k", "attention", "l2_normalised", lambda v: v, KDA_DENSE, "attn_out"),
    ("a mean in that norm", "attention", "L2_EPS", 0.3, KDA_MOE, "attn_out"),
    ("A_log's last entries", "attention", "head_decays", lambda s, heads: s[-heads:], KDA_DENSE, "attn_out"),
    ("A_log one head off", "attention", "head_decays", lambda s, heads: s[1 : heads + 1], KDA_MOE, "attn_out"),
    ("no SiLU after the convolutions", "attention", "silu", lambda x: x, KDA_DENSE, "attn_out"),
    ("the read before the decay", "attention", "recurrence", late_read, KDA_DENSE, "attn_out"),
    ("1e-5 in the latent norms", "attention", "MLA_LATENT_EPS", 1e-5, MLA_MOE, "attn_out"),
    ("the mix of normed rows", "model", "mix", normed_rows, MLA_MOE, "attn_in"),
    ("nibbles swapped", "feed_forward", "matmul_mxfp4", swapped_nibbles, KDA_MOE, "latent_aggregate"),
    ("scales by two", "feed_forward", "matmul_mxfp4", doubled_scale, LAST, "latent_aggregate"),
    ("gate and up exchanged", "feed_forward", "situ", exchanged_situ, KDA_MOE, "latent_aggregate"),
    ("gate and up exchanged", "feed_forward", "situ", exchanged_situ, KDA_DENSE, "mlp_out"),
    ("the router's bias in the weights", "model", "scores_of", biased_scores, KDA_MOE, "router_weights"),
]


@pytest.mark.parametrize(
    ("module", "name", "instead", "layer", "first"),
    [pytest.param(*rest, id=what) for what, *rest in MISTAKES],
)
def test_a_mistake_is_seen_and_placed(
    own: OwnModel,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    name: str,
    instead: Any,
    layer: int,
    first: str,
) -> None:
    part = torch_part(module)
    monkeypatch.setattr(part, name, instead)
    (report,) = reports_of(own, reference, layer)
    assert not report.passed
    assert failed_arrays(report)[0] == first, log_lines(report)
    assert report.failures[0].max_rel > 1.3 * report.failures[0].tolerance


# --- mistakes on our side


def forgetful(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Our kernels with one thing not carried from piece to piece."""
    attention = importlib.import_module("k3ray.workers.model.attention")
    if what == "matrices":
        recurrence = attention.kda.recurrence
        monkeypatch.setattr(
            attention.kda, "recurrence", lambda matrices, *rest: recurrence(np.zeros_like(matrices), *rest)
        )
    elif what == "tails":
        convolve = attention.convolution.short_convolution
        monkeypatch.setattr(
            attention.convolution, "short_convolution", lambda x, taps, tail: convolve(x, taps, tail.copy())
        )
    else:
        attend = attention.mla.attend

        def without_history(q: Any, cache: Any, position: int, *rest: Any) -> Any:
            seen = cache.copy()
            seen[:position] = 0
            return attend(q, seen, position, *rest)

        monkeypatch.setattr(attention.mla, "attend", without_history)


@pytest.mark.parametrize(
    ("what", "layer", "state"),
    [("matrices", KDA_DENSE, "matrices"), ("tails", KDA_MOE, "tail_q"), ("cache", MLA_MOE, "")],
)
def test_state_that_is_not_carried_is_seen(
    own: OwnModel, reference: Reference, monkeypatch: pytest.MonkeyPatch, what: str, layer: int, state: str
) -> None:
    forgetful(monkeypatch, what)
    (report,) = reports_of(own, reference, layer)
    assert failed_arrays(report)[0] == "attn_out"
    assert report.failures[0].row >= report.pieces[0], "the first piece has nothing to forget"
    assert not state or state in failed_arrays(report)
    (alone,) = reports_of(own, reference, layer, tokens=1)
    assert not [found for found in alone.failures if found.name == "attn_out"]


def damaged_copy(model_dir: Path, folder: Path, name: str, change: Callable[[npt.NDArray[np.uint8]], None]) -> Path:
    """The checkpoint with one tensor's bytes changed in place."""
    copy = folder / "damaged"
    shutil.copytree(model_dir, copy)
    index = open_index(copy, [])
    entry = index.find(name)
    assert entry is not None
    contents = np.fromfile(entry.path, np.uint8)
    change(contents[entry.offset : entry.offset + entry.nbytes])
    contents.tofile(entry.path)
    return copy


def swap_nibbles(values: npt.NDArray[np.uint8]) -> None:
    values[:] = (values >> 4) | (values << 4)


def halve_last(values: npt.NDArray[np.uint8]) -> None:
    values[-1] -= 1


def flip_a_sign(values: npt.NDArray[np.uint8]) -> None:
    values[1] ^= 0x80


@pytest.mark.parametrize(
    ("tensor", "change", "layer", "first"),
    [
        ("block_sparse_moe.experts.{e}.w2.weight_packed", swap_nibbles, LAST, "latent_aggregate"),
        ("block_sparse_moe.experts.{e}.w1.weight_scale", halve_last, LAST, "latent_aggregate"),
        ("self_attn.o_proj.weight", flip_a_sign, KDA_MOE, "attn_out"),
        ("self_attn.kv_a_layernorm.weight", flip_a_sign, MLA_MOE, "attn_out"),
        ("mlp_res_proj.weight", flip_a_sign, MLA_MOE, "mlp_in"),
    ],
)
def test_other_weights_are_seen(
    own: OwnModel,
    model_dir: Path,
    reference: Reference,
    tmp_path: Path,
    tensor: str,
    change: Callable[[npt.NDArray[np.uint8]], None],
    layer: int,
    first: str,
) -> None:
    """One sign, one scale byte, one expert's nibbles: our side reads them, the reference the sound checkpoint."""
    (sound,) = reports_of(own, reference, layer)
    fed = random_inputs(own.config, layer, TOKENS, 3)
    with own.layer(layer) as loaded:
        expert_ids = loaded.run(fed.prefix, fed.blocks, cut(TOKENS)).expert_ids
    assert sound.passed and expert_ids is not None
    name = f"language_model.model.layers.{layer}." + tensor.format(e=int(expert_ids[0, 0]))
    other = OwnModel(damaged_copy(model_dir, tmp_path, name, change), None, 1)
    (report,) = reports_of(other, reference, layer)
    assert failed_arrays(report)[0] == first


def test_a_nan_fails_its_layer_and_the_others_are_still_compared(
    model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    def nan(values: npt.NDArray[np.uint8]) -> None:
        values[:2] = 0xC0, 0x7F

    name = f"language_model.model.layers.{KDA_MOE}.self_attn.o_proj.weight"
    other = OwnModel(damaged_copy(model_dir, tmp_path, name, nan), None, 1)
    reports = reports_of(other, reference, KDA_DENSE, KDA_MOE, MLA_MOE)
    assert [report.passed for report in reports] == [True, False, True]
    assert "layer 1 (KDA attention)" in reports[1].problem


# --- experts that nearly tie


def twin_rows(values: npt.NDArray[np.uint8]) -> None:
    rows = values.reshape(ALL_KINDS.num_experts, -1)
    rows[1::2] = rows[::2]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts 2i and 2i + 1 have the same router row and bias; three are chosen: a pair always stands at the edge."""
    folder = tmp_path_factory.mktemp("twins")
    sound = synthetic_model(
        folder / "sound", replace(ALL_KINDS, num_hidden_layers=2, mla_layers=(), num_experts_per_token=3)
    )
    prefix = f"language_model.model.layers.{KDA_MOE}.block_sparse_moe.gate."
    (folder / "weight").mkdir()
    first = damaged_copy(sound, folder / "weight", prefix + "weight", twin_rows)
    return damaged_copy(first, folder, prefix + "e_score_correction_bias", twin_rows)


@pytest.mark.parametrize(("nudge", "near", "wrong"), [(0.0, 0, 0), (5e-7, TOKENS, 0), (1e-3, 0, TOKENS)])
def test_near_ties_are_told_apart_from_wrong_experts(
    twins: Path, monkeypatch: pytest.MonkeyPatch, nudge: float, near: int, wrong: int
) -> None:
    """The reference prefers the odd twin by a nudge; ours, as the contract has it, the lower number."""
    scores_of = torch_part("feed_forward").scores_of

    def nudged(read: Any, x: Any) -> Any:
        scores, selection = scores_of(read, x)
        selection[:, 1::2] += nudge
        return scores, selection

    monkeypatch.setattr(torch_part("model"), "scores_of", nudged)
    (report,) = reports_of(OwnModel(twins, None, 1), reference_of(twins), KDA_MOE)
    assert report.experts is not None and report.experts.closest <= nudge * 1.01
    assert (len(report.experts.near_ties), len(report.experts.wrong)) == (near, wrong)
    assert report.passed == (not wrong)
    told = [line for line in log_lines(report) if ("near tie: token" if near else "FAIL experts: token") in line]
    assert len(told) == near + wrong
    for tie in report.experts.near_ties:
        assert len(tie.ours) == len(tie.theirs) == 1 and tie.theirs[0] == tie.ours[0] + 1
        assert tie.margin == pytest.approx(nudge, rel=1e-6)


def test_choices_by_hand() -> None:
    selection = np.array([[0.1, 0.9, 0.5, 0.5 - 1e-7], [0.1, 0.9, 0.5, 0.2], [0.5, 0.5, 0.5, 0.1]])
    chosen = np.array([[1, 3], [1, 3], [0, 1]])
    choice = judge_choice(chosen, selection, 1e-6)
    assert [(tie.token, tie.ours, tie.theirs) for tie in choice.near_ties] == [(0, (3,), (2,))]
    assert [(other.token, other.margin) for other in choice.wrong] == [(1, pytest.approx(0.3))]
    assert choice.equal == 1 and choice.closest == 0.0 and choice.describe() == "1/3 (1 near tie)"
    ids = np.array([[1, 2], [1, 2], [0, 1]])
    assert settle_ties(chosen, selection, ids, 1e-6).tolist() == [[1, 3], [1, 2], [0, 1]]
    twice = judge_choice(np.array([[1, 1]]), selection[:1], 1e-6)
    assert twice.wrong[0].margin == np.inf


def test_comparing_by_hand() -> None:
    expected = np.array([[100.0, 1.0], [0.1, 0.0], [0.0, 0.0]])
    found = expected + np.array([[1e-3, 0.0], [0.0, -1e-5], [0.0, 0.0]])
    result = compare("x", found, expected, 1e-4)
    assert (result.row, result.column) == (1, 1), "the small row is worse in relation, the large one in value"
    assert result.max_rel == pytest.approx(1e-4) and result.max_abs == pytest.approx(1e-3)
    assert compare("x", expected, expected, 0.0).passed and compare("x", expected, expected, 0.0).used == 0
    for bad in (np.nan, np.inf):
        for pair in ((np.array([[bad, 1.0]]), np.ones((1, 2))), (np.ones((1, 2)), np.array([[bad, 1.0]]))):
            assert not compare("x", *pair, 1e9).passed
    assert not compare("x", np.ones((1, 2)), np.ones((2, 1)), 1.0).passed
    assert not compare("x", np.array([[1e-30]]), np.array([[0.0]]), 1.0).passed
    (missing,) = compare_all(("a", "b"), {"a": np.ones((1, 1))}, {}, 1.0)
    assert missing.name == "a" and not missing.passed


# --- the command


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
    assert [line[:16].split() for line in lines[1:]] == [["PASS", "layer", str(layer)] for layer in range(4)] + [
        ["PASS", "prompt", "of"]
    ]
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
    with pytest.raises(InputsFailure, match="recorded 9 layers of width 160, this model has 4 of 56"):
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


def test_without_torch_one_message_says_what_to_install(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ReferenceFailure, match=r"pip install 'k3ray\[reference\]'") as refused:
        run(request(model_dir))
    assert refused.value.exit_code == 2


def test_an_installed_package_without_the_source_says_where_to_get_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (default_reference() / "model.py").is_file()
    monkeypatch.setattr(conform_reference, "default_reference", lambda: tmp_path / "scripts" / "torch_reference")
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
