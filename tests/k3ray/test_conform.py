"""Conformance with the PyTorch reference: what agrees passes, and a mistake in the reference is seen and placed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.conform.conformance import TOLERANCES, Conformance, ReferenceBroke
from k3ray.conform.inputs import Recording
from k3ray.conform.own_side import OwnModel
from k3ray.conform.reference import Reference
from k3ray.conform.report import conclusion, log_lines
from tests.conforming import (
    KDA_DENSE,
    KDA_MOE,
    LAST,
    MLA_MOE,
    TOKENS,
    failed_arrays,
    reference_of,
    reports_of,
    torch_part,
)
from tests.goldens import read_golden

pytest.importorskip("torch", reason="the reference is a PyTorch model: pip install 'k3ray[reference]'")


pytestmark = pytest.mark.usefixtures("bare_environment")


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


# --- mistakes in the reference: as far away as the same mistakes on our side


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
    ("another eps in that norm", "attention", "L2_EPS", 0.3, KDA_MOE, "attn_out"),
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
    ("no block begun", "settings", "Settings.begins_block", lambda settings, layer: False, MLA_MOE, "mlp_in"),
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
    monkeypatch.setattr(f"torch_reference.{module}.{name}", instead)
    (report,) = reports_of(own, reference, layer)
    assert not report.passed
    assert failed_arrays(report)[0] == first, log_lines(report)
    assert report.failures[0].max_rel > 1.3 * report.failures[0].tolerance


def test_a_reference_that_fails_is_no_pass(
    own: OwnModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer lists read as zero-based: the reference looks for tensors that the layer does not have."""
    part = torch_part("settings").Settings
    monkeypatch.setattr(part, "attends_with_mla", lambda settings, layer: layer in settings.linear["full_attn_layers"])
    with pytest.raises(ReferenceBroke, match=r"layer 2: the reference failed and nothing was compared.*conv1d|q_proj"):
        reports_of(own, reference, MLA_MOE)


def test_the_reference_decodes_released_bytes(shared_data: Path) -> None:
    """64 rows of a released expert: every value, in every bit, and not with the nibbles swapped."""
    import torch

    record = json.loads((shared_data / "mxfp4.json").read_text())
    packed, scales, expected = (np.array(record[name]["data"]) for name in ("packed", "scales", "expected"))
    rows = record["rows"]
    decode = torch_part("arithmetic").decode_mxfp4
    bytes_of = [torch.from_numpy(values.astype(np.uint8).reshape(rows, -1)) for values in (packed, scales)]
    for dtype in (torch.float32, torch.float64):
        found = decode(*bytes_of, dtype).numpy()
        assert found.tobytes() == expected.astype(found.dtype).reshape(rows, -1).tobytes()
    swapped = decode((bytes_of[0] >> 4) | (bytes_of[0] << 4), bytes_of[1], torch.float32).numpy()
    assert swapped[0, :64].tolist() == record["expected_swapped_nibbles"]["first64"] != expected[:64].tolist()
