"""k3ray audit: what it prints, what it writes, how it ends; and what it executes itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from k3ray.audit.address import AddressError
from k3ray.audit.executed import KDA_TOLERANCE, GoldenError, golden_statements, has_golden, kda_statements
from k3ray.audit.kda_cases import SHAPES, KdaCase
from k3ray.audit.snapshot import Snapshot
from k3ray.audit.snapshot_file import read_snapshot
from k3ray.commands import audit
from k3ray.commands.audit import AuditRequest, OutputsClash, run
from k3ray.commands.audit_tables import print_snapshot
from k3ray.files import OutputFailure
from k3ray.workers.failure import Failure
from tests.range_server import serve

Captured = pytest.CaptureFixture[str]
REQUEST = AuditRequest(None, None, None, None, False, False)
CASES = tuple(KdaCase(shape, 4e-8, 9e-7, 1.5e-7, 2.5e-7, "dt_bias -3", 18) for shape in SHAPES)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment of the tester's; the kernel cases, which have tests of their own, are not run again."""
    for name in ("K3_MODEL_DIR", "K3_TOK_FILES", "OMP_NUM_THREADS", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(audit, "run_cases", lambda: CASES)


@pytest.fixture
def plain(k3b_dir: Path, tmp_path: Path) -> Path:
    """k3b without its golden."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for path in k3b_dir.iterdir():
        if not path.name.startswith("golden"):
            shutil.copyfile(path, folder / path.name)
    return folder


def test_tables_json_and_page(plain: Path, tmp_path: Path, capsys: Captured) -> None:
    out, page = tmp_path / "audit.json", tmp_path / "audit.html"
    run(replace(REQUEST, source=str(plain), out=out, page=page, probe=True))
    printed = capsys.readouterr()
    assert "A_log: its stored shape" in printed.out
    assert "router stress probe, synthetic" in printed.out
    assert "recorded by others" in printed.out
    assert "DISAGREES" not in printed.out
    last = printed.err.splitlines()[-1]
    assert "none disagrees; read 285.477 kB" in last
    assert f"wrote {out} and {page}; next: open {page} in a browser" in last
    snapshot = read_snapshot(out)
    assert {statement.kind for statement in snapshot.statements} == {"O", "D", "X", "S", "U"}
    assert sum(statement.id.startswith("kda.chunked.") for statement in snapshot.statements) == 6
    assert "<html" in page.read_text()[:500]


def test_json_is_the_snapshot_and_nothing_else(plain: Path, capsys: Captured) -> None:
    run(replace(REQUEST, source=str(plain), as_json=True))
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["format"], document["probe"]) == ("k3ray audit", None)
    assert f"wrote nothing; next: k3ray audit {plain} --out audit.json --page audit.html" in printed.err


def test_a_disagreement_comes_first_and_ends_with_one(plain: Path, tmp_path: Path, capsys: Captured) -> None:
    index = plain / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": 5225600', '"total_size": 5225601'))
    out = tmp_path / "audit.json"
    with pytest.raises(typer.Exit) as caught:
        run(replace(REQUEST, source=str(plain), out=out))
    assert caught.value.exit_code == 1
    printed = capsys.readouterr()
    assert printed.out.index("5,225,601") < printed.out.index("layers by attention")
    assert "1 DISAGREE (listed first)" in printed.err.splitlines()[-1]
    assert [statement.id for statement in read_snapshot(out).disagreements] == ["files.tensor_bytes"]


def test_over_http_with_a_password_that_is_not_shown(plain: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "audit.json"
    with serve(plain) as server:
        run(replace(REQUEST, source=server.address.replace("//", "//user:secret@"), out=out))
    printed = capsys.readouterr()
    assert f"auditing {server.address} (http)" in printed.err
    assert f"in {len(server.requests)} requests" in printed.err
    assert "secret" not in printed.out + printed.err + out.read_text()


def test_outputs_are_checked_before_the_work(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputFailure, match=r"--out .*does not exist"):
        run(replace(REQUEST, source=str(plain), out=tmp_path / "none" / "audit.json"))
    with pytest.raises(OutputFailure, match=r"--page .*this is a folder"):
        run(replace(REQUEST, source=str(plain), page=tmp_path))
    same = tmp_path / "audit"
    with pytest.raises(OutputsClash, match="found the file of --out"):
        run(replace(REQUEST, source=str(plain), out=same, page=same))


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="no folder that can be read"):
        run(replace(REQUEST, source=str(tmp_path / "none")))
    with pytest.raises(Failure, match=r"config\.json"):
        run(replace(REQUEST, source=str(tmp_path)))
    with pytest.raises(AddressError):
        run(replace(REQUEST, source="s3://bucket/model"))


def test_a_golden_beside_the_checkpoint_is_executed(k3b_dir: Path) -> None:
    assert has_golden(k3b_dir)
    found = golden_statements(k3b_dir)
    assert [(statement.kind, statement.agrees) for statement in found] == [("X", True)] * 4
    assert "130 positions" in found[3].subject


def test_a_golden_of_other_weights_disagrees(plain: Path, k3b_dir: Path) -> None:
    shutil.copyfile(k3b_dir / "golden.json", plain / "golden.json")
    with np.load(k3b_dir / "golden.npz") as archive:
        arrays = {name: archive[name] for name in archive.files if name.endswith(("_ids", "_logits"))}
    arrays["p2_logits"] = arrays["p2_logits"].copy()
    arrays["p2_logits"][1, 2] += 0.01
    arrays["p0_logits"] = arrays["p0_logits"][:-1]
    np.savez(plain / "golden.npz", **arrays)
    found = golden_statements(plain)
    assert [(one.kind, one.agrees) for one in found] == [("X", False), ("X", True), ("X", False), ("X", True)]
    assert "computed [41, 512], recorded [40, 512]" in found[0].found


def test_a_golden_that_cannot_be_read_disagrees(plain: Path) -> None:
    (plain / "golden.json").write_text('{"prompts": [{}]}')
    (plain / "golden.npz").write_bytes(b"no archive")
    found = golden_statements(plain)
    assert [(one.kind, one.agrees, "not executed" in one.found) for one in found] == [("U", False, True)]
    assert GoldenError.exit_code == 1


@pytest.mark.parametrize(("error", "agrees"), [(KDA_TOLERANCE, True), (1.01 * KDA_TOLERANCE, False), (np.inf, False)])
def test_the_chunked_form_agrees_within_its_tolerance(error: float, agrees: bool) -> None:
    for case in (replace(CASES[0], relative_output=error), replace(CASES[0], relative_state=error)):
        assert kda_statements([case])[0].agrees is agrees


def test_names_that_look_like_markup_are_printed_as_they_are(sample: Snapshot, capsys: Captured) -> None:
    hostile = replace(sample.statements[0], found="[bold]x[/nonsense] \x1b[31m")
    print_snapshot(replace(sample, statements=(hostile,)))
    printed = capsys.readouterr().out
    assert "[bold]x[/nonsense]" in printed
    assert "\\x1b[31m" in printed
    assert "\x1b" not in printed


def test_a_wrong_layer_is_a_usage_error(plain: Path) -> None:
    code = "from k3ray.cli import main; main()"
    command = [sys.executable, "-c", code, "audit", str(plain), "--layers", "9", "--no-probe"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "--layers: found 9, expected layers from 0 to 8" in ended.stderr
    assert "Traceback" not in ended.stderr
