"""The last lines of verify, download and audit count one of a thing as one: 1 check, 1 file, 1 statement agrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3ray.audit.snapshot import Snapshot, Source, Statement
from k3ray.commands import audit, download, verify
from k3ray.commands.transfer_progress import line_of
from k3ray.download.counts import Reached
from k3ray.download.download import Summary
from k3ray.download.verdict import PASS, Finding, Verdict

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(("count", "said"), [(1, "PASS: 1 check; next"), (2, "PASS: 2 checks; next")])
def test_checks(count: int, said: str, capsys: Captured) -> None:
    verdict = Verdict("m", (Finding("headers", PASS, ""),) * count, None, frozenset(), False)
    verify.conclude(verdict, Path("m"))
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(("count", "said"), [(1, ": 1 file of 9 B are here"), (3, ": 3 files of 9 B are here")])
def test_files(count: int, said: str, capsys: Captured) -> None:
    download._tell(Summary("m", "a/b", "0" * 40, count, 9, 0, 9, 0, 1.0, None, None))
    assert said.replace("file of 9 B are", "file of 9 B is") in capsys.readouterr().err
    line = line_of(Reached(1, 9, 1, 0, 0, count), 0.0)
    assert line.endswith(f", 0 of {count} file" + "s" * (count > 1))


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 statement agrees, none disagrees; "), (2, "2 statements agree, none disagrees; ")]
)
def test_statements(count: int, said: str) -> None:
    source = Source("http", "http://m", "", None, 9, (), requests=count)
    statement = Statement("id", "tensors", "O", "k3ray", "what", "1", "1", True, "", False)
    snapshot = Snapshot("", "", source, (statement,) * count, (), (), (), None, ())
    line = audit.conclusion(snapshot, [], audit.AuditRequest(None, None, None, None, False, False))
    assert line.startswith(said) and f", in {count} request" + "s" * (count > 1) + "; wrote nothing" in line
