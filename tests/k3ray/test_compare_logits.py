"""compare-logits: figures by hand, files of every form, and the exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from k3ray.commands.compare_logits import ToleranceUsage, run
from k3ray.logits_comparison import LogitsMismatch, compare_logits, rank
from k3ray.logits_files import LogitsFileFailure, read_logits

Captured = pytest.CaptureFixture[str]
A = np.array([0.0, 3.0, 1.0, 2.0, -1.0, 0.5], np.float32)


def write(path: Path, values: Any) -> str:
    path.write_bytes(np.asarray(values, "<f4").tobytes())
    return str(path)


def test_figures_by_hand() -> None:
    b = A.copy()
    b[3] = 3.5  # the third becomes the first
    found = compare_logits(A, b)
    (row,) = found.rows
    assert (found.max_abs, found.max_rel) == (1.5, 0.5) and row.worst_id == 3
    assert row.top_ids == (1, 3, 2, 5, 0) and row.ranks == (1, 0, 2, 3, 4)
    assert (found.same_top, row.top_shared, found.differing, found.bitwise) == (0, 5, 1, False)
    p, q = (np.exp(values.astype(float)) / np.exp(values.astype(float)).sum() for values in (A, b))
    assert row.kl_ab == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-12)
    assert row.kl_ba == pytest.approx(float((q * np.log(q / p)).sum()), rel=1e-12)
    assert row.kl_ab != pytest.approx(row.kl_ba, rel=1e-3)


def test_two_coins() -> None:
    """KL of a coin of 1/2 and one of 1/4 : 3/4, known in closed form."""
    found = compare_logits(np.log(np.array([0.5, 0.5])), np.log(np.array([0.25, 0.75])))
    assert found.rows[0].kl_ab == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert found.rows[0].kl_ba == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))


def test_a_shift_changes_no_probability_and_large_logits_do_not_overflow() -> None:
    found = compare_logits(A.astype(np.float64) * 1e4, A.astype(np.float64) * 1e4 + 100)
    assert found.max_abs == 100 and found.max_kl == 0 and found.same_top == 1


def test_ties_go_to_the_lower_id() -> None:
    flat = np.zeros(7, np.float32)
    assert [rank(flat.astype(np.float64), token_id) for token_id in range(7)] == list(range(7))
    found = compare_logits(flat, flat)
    assert found.rows[0].top_ids == found.rows[0].ranks == (0, 1, 2, 3, 4)


def test_rows_are_kept_apart() -> None:
    a = np.stack([A, A * 100, A])
    b = a.copy()
    b[2, 0] += 1
    found = compare_logits(a, b)
    assert found.max_rel == pytest.approx(1 / 3) and found.worst.row == 2
    assert found.same_top == 3 and [row.kl_ab > 0 for row in found.rows] == [False, False, True]


@given(arrays(np.float32, (2, 9), elements=st.floats(-50, 50, width=32)))
def test_what_must_hold_for_any_two(pair: Any) -> None:
    forth, back = compare_logits(pair[0], pair[1]), compare_logits(pair[1], pair[0])
    assert forth.max_abs == back.max_abs and forth.same_top == back.same_top
    assert (forth.rows[0].kl_ab, forth.rows[0].kl_ba) == (back.rows[0].kl_ba, back.rows[0].kl_ab)
    assert sorted(set(forth.rows[0].ranks)) == sorted(forth.rows[0].ranks)
    itself = compare_logits(pair, pair)
    assert itself.bitwise and itself.max_abs == itself.max_kl == 0 and itself.same_top == 2


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (A, A[:-1], r"shape \(6,\), B \(5,\)"),
        (np.stack([A, A]), A, "not logits of the same positions"),
        (np.array([1, np.nan]), np.zeros(2), "A has 1 values that are NaN or infinite, the first in row 0 at id 1"),
        (np.zeros(2), np.array([-np.inf, 0]), "B has 1 values"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "with something in it"),
        (np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), r"expected \(vocab,\)"),
        (np.float32(3), np.float32(3), r"found the shape \(\), expected \(vocab,\)"),
        (np.zeros((1, 1)), np.float32(3), r"expected \(vocab,\)"),
    ],
)
def test_what_cannot_be_compared(a: Any, b: Any, words: str) -> None:
    with pytest.raises(LogitsMismatch, match=words) as refused:
        compare_logits(a, b)
    assert refused.value.exit_code == 2


def test_files_of_every_form_hold_the_same_logits(tmp_path: Path) -> None:
    raw = write(tmp_path / "dump.f32", A)
    np.save(tmp_path / "a.npy", A)
    np.savez(tmp_path / "one.npz", logits=A)
    np.savez(tmp_path / "two.npz", first=A, second=A + 1)
    (tmp_path / "list.json").write_text(json.dumps(A.tolist()))
    (tmp_path / "named.json").write_text(json.dumps({"logits": [A.tolist()]}))
    names = [raw, *(str(tmp_path / name) for name in ("a.npy", "one.npz", "two.npz:first", "one.npz:logits"))]
    for name in names:
        assert read_logits(name).tobytes() == A.tobytes(), name
    for name in ("list.json", "named.json"):
        found = compare_logits(read_logits(str(tmp_path / name)).reshape(-1), A)
        assert found.max_abs == 0 and not found.bitwise, "JSON's numbers are doubles"
    assert (read_logits(str(tmp_path / "two.npz:second")) == A + 1).all()


def test_files_that_hold_no_logits(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", first=A, second=A)
    np.save(tmp_path / "whole.npy", np.arange(3))
    for name, contents in (
        ("odd.f32", b"12345"), ("empty.f32", b""), ("text.json", b"{"), ("damaged.npz", b"PK no archive"),
        ("run.json", b'{"generated_ids": [1]}'), ("ragged.json", b"[[1, 2], [3]]"), ("words.json", b'["a"]'),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(contents)
    for name, words in {
        "absent.f32": "no such file",
        "odd.f32": "found 5 bytes",
        "empty.f32": "found 0 bytes",
        "two.npz": r"2 arrays and which of them is not said.*two\.npz:NAME with one of first, second",
        "two.npz:third": "none is named 'third'",
        "whole.npy": "found int64",
        "text.json": "not JSON",
        "damaged.npz": "cannot be read",
        "run.json": "the report of a run.*--dump-logits",
        "ragged.json": "of one length",
        "words.json": "expected numbers",
    }.items():
        with pytest.raises(LogitsFileFailure, match=words) as refused:
            read_logits(str(tmp_path / name))
        assert refused.value.exit_code == 2


def ended(a: str, b: str, **options: Any) -> int:
    settings: dict[str, Any] = {"tolerance": None, "max_kl": None, "as_json": False, **options}
    try:
        run(a, b, **settings)
    except typer.Exit as ending:
        return ending.exit_code
    return 0


def test_exit_codes_and_what_is_said(tmp_path: Path, capsys: Captured) -> None:
    a, same = write(tmp_path / "a", A), write(tmp_path / "same", A)
    b = write(tmp_path / "b", A + np.array([0, 0, 0.001, 0, 0, 0]))
    assert ended(a, same) == 0
    assert "equal in every bit" in capsys.readouterr().out
    assert ended(a, b) == 1, "without a tolerance only equal bits will do"
    printed = capsys.readouterr()
    assert "no tolerance was given" in printed.err and "1 of 6 values differ" in printed.out
    assert "1 of 1 rows choose the same id" in printed.out and "1 -> 1, 3 -> 2" in printed.out
    assert ended(a, b, tolerance=2e-3) == 0
    assert ended(a, b, tolerance=9e-4) == 1
    assert "over --tolerance 0.0009" in capsys.readouterr().err
    assert ended(a, b, max_kl=1e-3) == 0
    assert ended(a, b, tolerance=1.0, max_kl=1e-12) == 1
    assert "over --max-kl" in capsys.readouterr().err
    for bad in ({"tolerance": -1.0}, {"tolerance": float("nan")}, {"max_kl": float("inf")}):
        with pytest.raises(ToleranceUsage):
            ended(a, b, **bad)


def test_a_numpy_file_of_another_ending_is_not_taken_for_raw_floats(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(32, np.float32))
    (tmp_path / "a.logits").write_bytes((tmp_path / "a.npy").read_bytes())
    with pytest.raises(LogitsFileFailure, match=r"rename it to \.npy"):
        read_logits(str(tmp_path / "a.logits"))
    assert read_logits(str((tmp_path / "a.npy").rename(tmp_path / "a.NPY"))).shape == (32,)


def test_files_of_other_commands_are_not_taken_for_raw_floats(tmp_path: Path, k3b_dir: Path) -> None:
    """Each padded to a length that float32 could have."""
    header = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}  '
    for contents, words in (
        (len(header).to_bytes(8, "little") + header + bytes(16), "a safetensors file"),
        (b"k3ray state file" + bytes(240), "a saved state"),
        (b"layer 0 PASS 1.0\n" * 4, "a text"),
        (b'{"generated_ids": [1, 2, 3], "text": "a report under another name..........."}   ', "a text"),
    ):
        (tmp_path / "logits").write_bytes(contents + b" " * (-len(contents) % 4))
        with pytest.raises(LogitsFileFailure, match=f"found {words}.*--dump-logits"):
            read_logits(str(tmp_path / "logits"))
    shard = next(path for path in sorted(k3b_dir.glob("*.safetensors")) if not path.stat().st_size % 4)
    with pytest.raises(LogitsFileFailure, match="a safetensors file"):
        read_logits(str(shard))
    for values in (A, np.zeros(64, np.float32), np.full(64, 1e-30, np.float32)):
        assert read_logits(write(tmp_path / "sound", values)).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "text", ['["1.5", "2"]', "[true, 1.0]", "[1.0, null]", '{"logits": [[1], ["2"]]}', '"abc"', "3e"]
)
def test_json_that_numpy_would_take_for_numbers(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(LogitsFileFailure, match=r"expected numbers|not JSON"):
        read_logits(str(tmp_path / "a.json"))


def test_floats_wider_than_double_are_refused(tmp_path: Path) -> None:
    """Two that are both infinite in double would differ by NaN, which is over no tolerance."""
    wide = np.array(["1e400", "1"], np.longdouble)
    if wide.itemsize == 16:
        np.save(tmp_path / "a.npy", wide)
        with pytest.raises(LogitsFileFailure, match="float128, expected logits in float16"):
            read_logits(str(tmp_path / "a.npy"))


@given(arrays(np.float32, (2, 3, 7), elements=st.sampled_from([-7.5, -0.0, 0.0, 0.25, 1.0, 1.5, 12.0, 30.0])))
def test_every_figure_by_another_computation(pair: Any) -> None:
    """Few values, so that ties are everywhere: ranks by sorting pairs, probabilities with exact sums of fractions."""
    found = compare_logits(*pair)
    for row, (a, b) in zip(found.rows, zip(*pair.tolist(), strict=True), strict=True):
        differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
        assert row.max_abs == max(differences) == differences[row.worst_id]
        largest = max(map(abs, a))
        assert row.max_rel == (max(differences) / largest if largest else (np.inf if max(differences) else 0))
        best_a, best_b = (sorted(range(7), key=lambda i: (-row[i], i)) for row in (a, b))
        assert list(row.top_ids) == best_a[:5] and list(row.ranks) == [best_b.index(i) for i in best_a[:5]]
        assert row.top_shared == len(set(best_a[:5]) & set(best_b[:5])) and row.same_top == (best_a[0] == best_b[0])
        p, q = ([math.exp(x) / math.fsum(map(math.exp, row)) for x in row] for row in (a, b))
        for ours, first, second in ((row.kl_ab, p, q), (row.kl_ba, q, p)):
            expected = math.fsum(x * math.log(x / y) for x, y in zip(first, second, strict=True))
            assert ours == pytest.approx(expected, rel=1e-9, abs=1e-14)
    assert found.max_abs == max(row.max_abs for row in found.rows)
    assert found.differing == int(np.count_nonzero(pair[0] != pair[1]))
    assert found.bitwise == (pair[0].tobytes() == pair[1].tobytes())


def test_json_that_is_too_deep_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(LogitsFileFailure, match="not JSON"):
        read_logits(str(tmp_path / "deep.json"))


def test_doubles_too_far_apart_for_a_difference_never_pass(tmp_path: Path) -> None:
    """No figure that overflows is taken for a small one, and the JSON stays JSON."""
    for name, sign in (("a", -1), ("b", 1)):
        np.save(tmp_path / f"{name}.npy", np.array([1e308, sign * 1e308]))
    a, b = str(tmp_path / "a.npy"), str(tmp_path / "b.npy")
    found = compare_logits(read_logits(a), read_logits(b))
    assert found.max_kl == np.inf and found.max_abs == np.inf
    for options in ({"tolerance": 1e300}, {"max_kl": 1e300}):
        assert ended(a, b, **options) == 1


def test_json_of_an_infinite_figure_is_json(tmp_path: Path, capsys: Captured) -> None:
    a = write(tmp_path / "a", np.zeros(3, np.float32))
    b = write(tmp_path / "b", np.ones(3, np.float32))
    assert ended(a, b, tolerance=2.0, as_json=True) == 0
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["max_rel"] is None


def test_a_file_compared_with_itself_is_said(tmp_path: Path, capsys: Captured) -> None:
    a = write(tmp_path / "a", np.ones(3, np.float32))
    (tmp_path / "b").symlink_to(a)
    assert ended(a, str(tmp_path / "b")) == 0
    assert "A and B are one file" in capsys.readouterr().err


def test_zeros_of_either_sign_are_equal_in_value_not_in_bits(tmp_path: Path, capsys: Captured) -> None:
    a, b = write(tmp_path / "a", [0.0, 1.0]), write(tmp_path / "b", [-0.0, 1.0])
    assert ended(a, b) == 1 and ended(a, b, tolerance=0.0) == 0
    assert "equal in value, not in bits" in capsys.readouterr().out


def test_json_has_everything(tmp_path: Path, capsys: Captured) -> None:
    a, b = write(tmp_path / "a", A), write(tmp_path / "b", A[::-1])
    assert ended(a, b, tolerance=0.5, as_json=True) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["passed"] and len(record["complaints"]) == 1
    assert record["shape"] == [6] and record["rows"][0]["top_ids"] == [1, 3, 2, 5, 0] and record["same_top"] == 0


def test_the_goldens_own_rows(k3b_dir: Path, capsys: Captured) -> None:
    """Greedy logits of the recorded archive: its first row is the prompt's last one."""
    archive = k3b_dir / "golden.npz"
    assert ended(f"{archive}:p0_greedy_logits", f"{archive}:p0_greedy_logits") == 0
    assert "(32, 512): equal in every bit" in capsys.readouterr().out
    with np.load(archive) as arrays_of:
        found = compare_logits(arrays_of["p0_greedy_logits"], arrays_of["p1_greedy_logits"])
        assert [row.top_ids[0] for row in found.rows] == arrays_of["p0_greedy"].tolist()
    assert found.same_top < 32 and found.max_kl > 0.1
