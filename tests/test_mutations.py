"""The list of mistakes stays usable: every place is still there once, and every test named is still a test.

That each mistake is caught takes minutes and is shown by scripts/mutations.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.mutation_list import BadRecord, Mutation, read_mutations

ROOT = Path(__file__).resolve().parents[1]
MUTATIONS = read_mutations()


@cache
def names_in(file: str) -> frozenset[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_record_still_applies(mutation: Mutation) -> None:
    path = ROOT / mutation.file
    assert not path.is_symlink() and mutation.file.split("/")[0] in ("kernels", "workers", "cluster", "k3ray")
    text = path.read_text("utf-8")
    changed = mutation.applied(text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), "the edit changes no code"
    assert mutation.mistake and mutation.caught_by
    for node in mutation.caught_by:
        file, _, test = node.partition("::")
        assert test.partition("[")[0] in names_in(file), f"{node}: no such test"


@pytest.mark.parametrize(
    ("outcome", "raises", "result"),
    [
        (("passed", ""), "", "SURVIVED"),
        (("failed", "AssertionError: \nNot equal to tolerance"), "", "caught"),
        (("failed", "assert 1 == 2"), "", "caught"),
        (("failed", "Failed: DID NOT RAISE <class 'ValueError'>"), "", "caught"),
        (("failed", "ValueError: shapes"), "", "BROKEN"),
        (("failed", "k3ray.workers.model.state.SequenceFailure: session 0"), "SequenceFailure", "caught"),
        (("failed", "ValueError: SequenceFailure"), "SequenceFailure", "BROKEN"),
        (("error", "AssertionError: in a fixture"), "", "BROKEN"),
        (("skipped", "no data"), "", "BROKEN"),
    ],
)
def test_only_a_failed_assertion_counts_as_caught(outcome: tuple[str, str], raises: str, result: str) -> None:
    path = str(ROOT / "scripts" / "mutations")
    loader = SourceFileLoader("mutations_script", path)
    script = module_from_spec(spec_from_loader("mutations_script", loader))
    sys.modules["mutations_script"] = script  # dataclasses look their module up
    loader.exec_module(script)
    record = Mutation("a", "b", "f.py", "x = 1", "x = 2", ("t",), raises)
    assert script.judge(record, {"t": script.Outcome(*outcome)})[0] == result


def test_an_edit_needs_its_place_exactly_once() -> None:
    record = Mutation("a", "b", "f.py", "x = 1", "x = 2", ("t",))
    assert record.applied("x = 1\ny = 1\n") == "x = 2\ny = 1\n"
    for text in ("", "x = 1; x = 1"):
        with pytest.raises(BadRecord, match="expected once"):
            record.applied(text)


def test_names_that_occur_twice_are_refused(tmp_path: Path) -> None:
    record = '[[mutation]]\nname = "a"\nmistake = "m"\nfile = "f"\nold = "o"\nnew = "n"\ncaught_by = ["t"]\n'
    (tmp_path / "a.toml").write_text(record)
    assert read_mutations(tmp_path) == [Mutation("a", "m", "f", "o", "n", ("t",))]
    (tmp_path / "b.toml").write_text(record)
    with pytest.raises(BadRecord, match="occur twice: a"):
        read_mutations(tmp_path)
    (tmp_path / "b.toml").write_text("[[mutations]]\n")
    with pytest.raises(BadRecord, match=r"b.toml: found mutations"):
        read_mutations(tmp_path)
