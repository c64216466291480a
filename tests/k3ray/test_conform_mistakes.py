"""Conformance when our side is wrong: state that is lost, other weights, NaN, and experts that nearly tie."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.conform.comparison import cut
from k3ray.conform.conformance import TOLERANCES, Conformance, ReferenceBroke
from k3ray.conform.inputs import RecordedPrompt, random_inputs
from k3ray.conform.own_side import OwnModel
from k3ray.conform.reference import Reference
from k3ray.conform.report import conclusion, log_lines, table_line
from tests.conforming import (
    ALL_KINDS,
    KDA_DENSE,
    KDA_MOE,
    LAST,
    MLA_MOE,
    TOKENS,
    damaged_copy,
    failed_arrays,
    reference_of,
    reports_of,
    torch_part,
)
from tests.tapes import synthetic_model

pytest.importorskip("torch", reason="the reference is a PyTorch model: pip install 'k3ray[reference]'")


pytestmark = pytest.mark.usefixtures("bare_environment")


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
    conformance = Conformance(other, reference, TOLERANCES["float64"])
    inputs = partial(random_inputs, other.config, tokens=TOKENS, seed=3)
    prompt = RecordedPrompt("p", [3, 5], np.empty((0, 0)))
    reports = list(conformance.run([KDA_DENSE, KDA_MOE, MLA_MOE], inputs, [prompt]))
    assert [report.passed for report in reports] == [True, False, True, False]
    assert "layer 1 (KDA attention)" in reports[1].problem
    assert reports[3].name == "prompt p" and "not compared: layer 1 failed" in reports[3].problem
    assert "2 of 4 FAIL: layer 1, prompt p" in conclusion(reports) and "nothing" in conclusion([])
    assert all("FAIL" in table_line(report) and log_lines(report) for report in (reports[1], reports[3]))


def test_a_nan_in_the_head_fails_the_prompt(model_dir: Path, reference: Reference, tmp_path: Path) -> None:
    def nan(values: npt.NDArray[np.uint8]) -> None:
        values[:2] = 0xC0, 0x7F

    other = OwnModel(damaged_copy(model_dir, tmp_path, "language_model.lm_head.weight", nan), None, 1)
    inputs = partial(random_inputs, other.config, tokens=2, seed=3)
    prompts = [RecordedPrompt(name, [3, 5], np.empty((0, 0))) for name in ("first", "second")]
    reports = list(Conformance(other, reference, TOLERANCES["float64"]).run(range(4), inputs, prompts))
    assert [report.passed for report in reports] == [True] * 4 + [False] * 2
    assert "logits" in reports[5].problem and "2 of 6 FAIL: prompt first, prompt second" in conclusion(reports)


@pytest.mark.parametrize(("what", "said"), [("embed", "the embedding"), ("logits", "the head")])
def test_a_reference_that_fails_outside_the_layers(
    own: OwnModel, reference: Reference, monkeypatch: pytest.MonkeyPatch, what: str, said: str
) -> None:
    def absent(*_: Any) -> Any:
        raise KeyError("lm_head.weight")

    monkeypatch.setattr(reference, what, absent)
    inputs = partial(random_inputs, own.config, tokens=2, seed=3)
    run = Conformance(own, reference, TOLERANCES["float64"]).run(
        range(4), inputs, [RecordedPrompt("p", [3], np.empty((0, 0)))]
    )
    with pytest.raises(ReferenceBroke, match=f"{said}: the reference failed and nothing was compared.*lm_head"):
        list(run)


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
