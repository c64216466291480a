"""The PyTorch reference by itself, without our side: against the operator fixtures and what the official code recorded.

A formula that is wrong in both our kernels and the reference would pass every conformance run; these numbers come from
neither.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.conform.inputs import Recording
from k3ray.conform.own_side import OwnModel
from tests.conforming import reference_of, torch_part
from tests.goldens import read_golden
from tests.op_fixtures import Fixture

torch: Any = pytest.importorskip("torch", reason="the reference is a PyTorch model: pip install 'k3ray[reference]'")

Load = Callable[[str], Fixture]


@pytest.fixture
def fixture(shared_data: Path) -> Load:
    return lambda name: Fixture(shared_data / "ops" / f"{name}.json")


def double(values: Any) -> Any:
    return torch.from_numpy(np.array(values)).double()


def settings_of(fixture: Fixture, **config: Any) -> Any:
    """The settings of the fixtures' one model, as far as a fixture needs them."""
    linear = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
    betas = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    mla = {
        "num_attention_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16, "kv_lora_rank": 32,
    }  # fmt: skip
    moe = {"moe_renormalize": True, "routed_scaling_factor": 1.0, "latent_moe_use_norm": True, "num_shared_experts": 2}
    return torch_part("settings").Settings(
        {"rms_norm_eps": fixture["rms_eps"], **betas, **mla, **moe, **config}, linear
    )


def test_primitives(fixture: Load) -> None:
    arithmetic, attention = torch_part("arithmetic"), torch_part("attention")
    f = fixture("rmsnorm")
    f.check(arithmetic.rms_norm(double(f["in"]), double(f["weight"]), f["eps"]).numpy(), "out")
    f = fixture("situ_glu")
    f.check(arithmetic.situ(*double(f["in"]).chunk(2, dim=1), f["beta"], f["linear_beta"]).numpy(), "out")
    f = fixture("attnres")
    blocks, prefix, norm, projection = (
        double(f[name]) for name in ("block_residual", "prefix_sum", "norm_weight", "proj_weight")
    )
    f.check(arithmetic.mix(blocks, prefix, norm, projection, f["eps"]).numpy(), "out")
    f = fixture("shortconv")
    padded = torch.cat([torch.zeros(3, 64), double(f.rows("in")), double(f.rows("in_next"))])
    convolved = attention.silu(attention.short_convolution(padded, double(f["weight"]).reshape(64, 4))).numpy()
    f.check(convolved[:-1], "out")
    f.check(convolved[-1], "out_next")


@pytest.mark.parametrize("name", ["kda_recur1", "kda_recur8"])
def test_recurrence(fixture: Load, name: str) -> None:
    f = fixture(name)
    q, k, v, alpha, beta = (double(f[part]) for part in ("q", "k", "v", "alpha", "beta"))
    empty = torch.zeros(f["H"], f["d_k"], f["d_v"], dtype=torch.float64)
    o, state = torch_part("attention").recurrence(empty, q * f["q_scale"], k, v, torch.log(alpha), beta)
    f.check(o.numpy(), "out")
    f.check(state.numpy(), "state_out")


def test_router(fixture: Load) -> None:
    part, f = torch_part("feed_forward"), fixture("router")
    tensors = {"gate.weight": double(f["gate_weight"]), "gate.e_score_correction_bias": double(f["bias"])}
    scores, selection = part.scores_of(tensors.__getitem__, double(f["in"]))
    ids = part.select(selection, f["top_k"])
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(1, keepdim=True)
    found = np.zeros((6, f["n_experts"]))
    expected = found.copy()
    np.put_along_axis(found, ids.numpy(), weights.numpy(), 1)
    np.put_along_axis(expected, f["topk_idx"].astype(int), f["topk_weight"].astype(float), 1)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=f.rtol, atol=f.atol)


KDA_SHORT = {
    "A_log": "A_log", "dt_bias": "dt_bias", "o_norm.weight": "o_norm", "b_proj.weight": "b_proj",
    "f_a_proj.weight": "f_a", "f_b_proj.weight": "f_b",
    **{f"{part}_conv1d.weight": f"{part}_conv" for part in "qkv"},
    **{f"{part}_proj.weight": f"{part}_proj" for part in "qkvgo"},
}  # fmt: skip


@pytest.mark.parametrize("name", ["kda_layer1", "kda_layer8"])
def test_kda(fixture: Load, name: str) -> None:
    f = fixture(name)
    attended = torch_part("attention").kda(
        settings_of(f), lambda tensor: double(f[KDA_SHORT[tensor]]), double(f.rows("in"))
    )
    f.check(attended.out.numpy(), "out")
    f.check(attended.state["matrices"].numpy(), "state_out")


def named(f: Fixture, prefix: str = "") -> Callable[[str], Any]:
    return lambda tensor: double(f[prefix + tensor.replace(".", "_")])


def test_mla(fixture: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """That project has 1e-5 in the latent norms."""
    part, f = torch_part("attention"), fixture("mla")
    monkeypatch.setattr(part, "MLA_LATENT_EPS", 1e-5)
    attended = part.mla(settings_of(f), named(f), double(f.rows("in")))
    f.check(attended.out.numpy(), "out")
    f.check(attended.state["cache"][:, :32].numpy(), "kv_latent")
    f.check(attended.state["cache"][:, 32:].numpy(), "k_rope")


MOE_SHORT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def moe_named(f: Fixture, prefix: str) -> Callable[[str], Any]:
    """The fixture's names for the released ones; its experts are float32, and their scales stand for nothing."""

    def read(tensor: str) -> Any:
        for released, theirs in {**MOE_SHORT, "shared_experts": "shared", "gate.e_score": "e_score"}.items():
            tensor = tensor.replace(released, theirs) if "shared" in tensor or "e_score" in tensor else tensor
        short = tensor.replace("routed_expert_", "").replace("_proj", "").replace(".weight_packed", ".weight")
        return double(f[prefix + short.replace(".weight_scale", ".weight").replace(".", "_")])

    return read


def routed(f: Fixture, prefix: str, x: Any) -> Any:
    part = torch_part("feed_forward")
    read = moe_named(f, prefix)
    scores, selection = part.scores_of(read, x)
    return part.mixture(settings_of(f), read, x, part.select(selection, 2), scores)["mlp_out"]


@pytest.fixture
def plain_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose weights are not in MXFP4."""
    monkeypatch.setattr(torch_part("feed_forward"), "matmul_mxfp4", lambda weight, scales, x: x @ weight.T)


@pytest.mark.usefixtures("plain_experts")
def test_moe(fixture: Load) -> None:
    f = fixture("moe")
    f.check_sum(routed(f, "", double(f.rows("in"))).numpy(), "out")


@pytest.mark.usefixtures("plain_experts")
@pytest.mark.parametrize("name", ["layer_kda", "layer_mla"])
def test_whole_layers(fixture: Load, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through ReferenceModel.run_layer, with the fixture in the place of the checkpoint."""
    f, part = fixture(name), torch_part("model")
    monkeypatch.setattr(torch_part("attention"), "MLA_LATENT_EPS", 1e-5)
    model = object.__new__(part.ReferenceModel)
    model._settings = settings_of(f, num_experts_per_token=2, attn_res_block_size=3, first_k_dense_replace=1)
    model._settings.linear["full_attn_layers"] = [4, 8, 12, 13]
    model._dtype = torch.float64
    moe, plain = moe_named(f, "mlp_"), named(f)

    def reader(layer: int, below: str = "") -> Callable[[str], Any]:
        assert layer == f["layer_idx"]
        return moe if below.startswith("block_sparse") else lambda tensor: plain(below.replace(".", "_") + tensor)

    monkeypatch.setattr(model, "_reader", reader)
    run = model.run_layer(f["layer_idx"], f.rows("in"), f["block_residual_in"])
    f.check(run.prefix, "out")
    f.check(run.blocks, "block_residual_out")
    assert ("cache" in run.state) == f["is_mla"]


@pytest.mark.parametrize("name", ["k3a", "k3b"])
def test_goldens(name: str, request: pytest.FixtureRequest) -> None:
    """Every layer from the recorded input: outputs, latents, experts, mixing weights, states; expanded keys, too."""
    path: Path = request.getfixturevalue(f"{name}_dir")
    arrays, own, reference = read_golden(path).arrays, OwnModel(path, None, 1), reference_of(path)
    recording = Recording(path / "golden.npz", own.config, own.embed)
    worst: dict[str, float] = {}

    def near(what: str, found: Any, expected: Any) -> None:
        error = np.abs(found - expected).max() / np.abs(expected).max()
        worst[what] = max(worst.get(what, 0.0), float(error))

    moe = own.config.moe_layers
    for layer in range(own.config.num_hidden_layers):
        fed = recording.layer(layer)
        run = reference.run_layer(layer, fed.prefix, fed.blocks, lambda selection, ids: ids)
        for stage, expected in fed.stages.items():
            near(stage, run.stages[stage], expected)
        for stage, expected in fed.state.items():
            near(stage, run.state[stage], expected)
        assert run.blocks.shape[1] == arrays["p0_n_blocks"][layer]
        for part in ("key", "value"):
            if (expected := arrays.get(f"p0_mla_{part}_L{layer}")) is not None:
                near(f"{part}s", run.state[f"{part}s"], expected)
        if layer in moe:
            assert run.expert_ids is not None
            near("weights", -np.sort(-run.stages["router_weights"], axis=1), arrays["p0_router_w"][layer - moe.start])
            ids = np.sort(arrays["p0_router_idx"][layer - moe.start], axis=1)
            assert (np.sort(run.expert_ids, axis=1) == ids).all()
    assert {"keys", "values", "weights", "matrices", "tail_v", "latent_normed", "shared_out", "mlp_out"} <= set(worst)
    assert max(worst.values()) < 2e-5, worst
