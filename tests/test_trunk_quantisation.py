"""The benchmark of a trunk in fewer bits: what it stores, by plain loops, and what it says of logits, by PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.trunk_comparison import Comparison
from benchmarks.trunk_forms import FORMS, TrunkForm, WeightError
from k3ray.kernels.threads import RowPool
from k3ray.workers.tape.order import full_name
from tests.conforming import reference_of, torch_part

BY_NAME = {form.name: form for form in FORMS}
IDS = [3, 500, 7, 11, 3]


def stored_plainly(row: list[float], bits: int, group: int | None, offset: bool) -> list[float]:
    """Round to the nearest step, one group of columns after the other; the last may be short."""
    found = []
    for first in range(0, len(row), group or len(row)):
        part = row[first : first + (group or len(row))]
        low = min(part) if offset else 0.0
        steps = 2**bits - 1 if offset else 2 ** (bits - 1) - 1
        scale = (max(part) - low if offset else max(map(abs, part))) / steps or 1.0
        found += [round((value - low) / scale) * scale + low for value in part]
    return found


@pytest.mark.parametrize("form", FORMS, ids=BY_NAME)
@pytest.mark.parametrize("columns", [1, 31, 32, 100, 128, 300])
def test_what_is_stored_by_plain_loops(form: TrunkForm, columns: int) -> None:
    rows = np.random.default_rng(columns).standard_normal((7, columns)).astype(np.float32)
    rows[1], rows[2, columns // 2 :], rows[3] = 0, 0, 0.25
    rows[4] = np.abs(rows[4])
    stored = form.stored(rows)
    expected = np.array([stored_plainly(row, form.bits, form.group, form.offset) for row in rows.tolist()])
    assert stored.shape == rows.shape and stored.dtype == np.float32
    np.testing.assert_allclose(stored, expected, rtol=3e-6, atol=3e-6)
    error = WeightError()
    error.add(rows[:3], stored[:3])
    error.add(rows[3:], stored[3:])
    assert error.count == rows.size
    assert error.relative == pytest.approx(np.linalg.norm(stored - rows) / np.linalg.norm(rows), rel=1e-5)


def test_gaussian_weights_have_the_error_that_theory_says() -> None:
    """A uniform step of s leaves s / sqrt(12) of each weight, whatever the weight."""
    rows = np.random.default_rng(0).standard_normal((200, 512)).astype(np.float32)
    for name, group, steps in (("int8, groups of 128", 128, 127), ("int4, groups of 32", 32, 7)):
        error = WeightError()
        error.add(rows, BY_NAME[name].stored(rows))
        scales = np.abs(rows.reshape(200, -1, group)).max(2) / steps
        expected = math.sqrt(np.square(scales).mean() / 12) / math.sqrt(np.square(rows).mean())
        assert error.relative == pytest.approx(expected, rel=0.02)


def test_bits_a_weight_costs() -> None:
    assert [form.bits_per_weight for form in FORMS] == [8, 8.125, 4.125, 4.5, 5]


def test_logits_are_those_of_the_stored_weights(k3b_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch with the same matrices rounded by PyTorch: every figure of the table's row from its logits."""
    torch = pytest.importorskip("torch", reason="the reference is a PyTorch model: pip install 'k3ray[reference]'")
    form = BY_NAME["int4, groups of 32"]
    with RowPool(1) as pool:
        comparison = Comparison(k3b_dir, IDS, pool)
        row = comparison.compare(form, "all matrices", list(comparison.tensors))
    names = {full_name(comparison.binding, tensor) for tensor in comparison.tensors}
    assert {name.rpartition("layers.0.")[2] for name in names} >= {"mlp.gate_proj.weight", "self_attn.q_proj.weight"}

    def logits() -> tuple[Any, list[Any]]:
        model = reference_of(k3b_dir)
        prefix, experts = model.embed(IDS), []
        blocks = prefix[:, None][:, :0]
        for layer in range(comparison.config.num_hidden_layers):
            run = model.run_layer(layer, prefix, blocks, lambda selection, ids: ids)
            prefix, blocks = run.prefix, run.blocks
            experts += [] if run.expert_ids is None else [run.expert_ids]
        return model.logits(prefix, blocks), experts

    exact, exact_experts = logits()
    folder = torch_part("tensors").TensorFolder
    read = folder._read
    difference = total = 0.0

    def rounded(self: Any, name: str) -> Any:
        nonlocal difference, total
        weight = read(self, name)
        if name not in names:
            return weight
        rows = weight.double()
        scales = [part.abs().amax(1, keepdim=True) / 7 + 1e-300 for part in rows.split(32, dim=1)]
        parts = zip(rows.split(32, dim=1), scales, strict=True)
        plain = torch.cat([torch.round(part / scale) * scale for part, scale in parts], dim=1)
        stored = torch.from_numpy(form.stored(weight.float().numpy())).double()
        other = (stored - plain).abs() > 1e-5 * rows.abs().max()  # only where both steps are equally near
        assert torch.allclose((stored - rows).abs()[other], (plain - rows).abs()[other], rtol=1e-5), name
        assert other.double().mean() < 0.03, name
        difference += float((stored - weight.double()).square().sum())
        total += float(weight.double().square().sum())
        return stored

    monkeypatch.setattr(folder, "_read", rounded)
    stored, stored_experts = logits()
    assert row.weight_error == pytest.approx(math.sqrt(difference / total), rel=1e-4)
    centred = exact - exact.mean(1, keepdims=True)
    error = math.sqrt(np.square(stored - exact).mean() / np.square(centred).mean())
    assert row.logit_error == pytest.approx(error, rel=1e-3)
    p, q = (torch.log_softmax(torch.from_numpy(values), 1) for values in (exact, stored))
    assert row.kl == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-3)
    assert row.top1_kept == (exact.argmax(1) == stored.argmax(1)).mean()
    pairs = [
        len(set(a) & set(b)) / len(a)
        for before, after in zip(exact_experts, stored_experts, strict=True)
        for a, b in zip(before.tolist(), after.tolist(), strict=True)
    ]
    assert row.experts_kept == pytest.approx(sum(pairs) / len(pairs))
    assert 0.05 < row.weight_error < 0.2 and row.logit_error > 0.1 and row.experts_kept < 1
