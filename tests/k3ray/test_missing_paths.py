"""A path that is not there is a mistake of the command line: exit code 2 in every command, before any work."""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import pytest

from k3ray.cli import app, main

NOWHERE = "/nowhere/at/all"
MODEL = "MODEL"  # stands for the golden checkpoint's folder
RUN = ("generate", MODEL, "--ids", "1")
CASES = {  # by command and parameter
    ("generate", "model_dir"): ("generate", NOWHERE, "--ids", "1"),
    ("generate", "prompt_file"): ("generate", MODEL, "--prompt-file", NOWHERE),
    **{
        ("generate", option): (*RUN, f"--{option.replace('_', '-')}", NOWHERE)
        for option in (
            "tok", "config", "out", "dump_logits", "dump_cache_trace", "tape", "load_state", "save_state",
            "plan", "roots",
        )
    },
    ("download", "directory"): ("download", NOWHERE),
    ("verify", "directory"): ("verify", NOWHERE, "--deep", "--repair", "--json"),
    ("inspect", "model_dir"): ("inspect", NOWHERE),
    ("pack", "model_dir"): ("pack", NOWHERE, "tape"),
    ("pack", "out"): ("pack", MODEL, NOWHERE),
    ("pack", "config"): ("pack", MODEL, "tape", "--config", NOWHERE),
    ("budget", "model_dir"): ("budget", NOWHERE),
    ("budget", "tape"): ("budget", MODEL, "--tape", NOWHERE),
    ("doctor", "model_dir"): ("doctor", NOWHERE),
    ("doctor", "tape"): ("doctor", MODEL, "--tape", NOWHERE),
    ("devbw", "path"): ("devbw", NOWHERE),
    ("devbw", "write"): ("devbw", NOWHERE, "--write"),
    ("simulate_cache", "trace"): ("simulate-cache", NOWHERE),
    ("simulate_cache", "plot"): ("simulate-cache", "trace.bin", "--plot", f"{NOWHERE}/a.png"),
    ("nodes", "model_dir"): ("nodes", NOWHERE),
    ("nodes", "roots"): ("nodes", MODEL, "--roots", NOWHERE),
    ("plan", "model_dir"): ("plan", NOWHERE),
    **{("plan", option): ("plan", MODEL, f"--{option}", NOWHERE) for option in ("cluster", "roots", "out")},
    ("selfcheck", "model_dir"): ("selfcheck", NOWHERE),
    ("audit", "source"): ("audit", NOWHERE),
    **{("audit", option): ("audit", MODEL, f"--{option}", NOWHERE) for option in ("out", "page")},
    ("conform", "model_dir"): ("conform", NOWHERE),
    **{
        ("conform", option): ("conform", MODEL, "--ids", "1", f"--{option.replace('_', '-')}", NOWHERE)
        for option in ("reference", "config", "save_inputs", "log", "inputs")
    },
    ("compare_logits", "a"): ("compare-logits", NOWHERE, "b"),
    ("compare_logits", "b"): ("compare-logits", "trace.bin", NOWHERE),
    ("make_checkpoint", "out"): ("make-checkpoint", NOWHERE),
}  # fmt: skip
ELSEWHERE = {("generate", "mirror"), ("nodes", "tape"), ("plan", "tape")}  # paths of the nodes, each says it has none


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_path_that_is_not_there_is_a_mistake_of_the_command_line(
    case: tuple[str, str],
    k3b_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bare_environment: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.bin").write_bytes(bytes(8 * 16))
    before = sorted(tmp_path.rglob("*"))
    arguments = [str(k3b_dir) if word == MODEL else word for word in CASES[case]]
    monkeypatch.setattr(sys, "argv", ["k3ray", *arguments])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nobody is asked there
    with pytest.raises(SystemExit) as ending:
        main()
    said = capsys.readouterr()
    assert ending.value.code == 2, said.err
    assert "/nowhere/at" in said.err and "Traceback" not in said.err
    assert said.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_no_path_of_a_command_is_left_out() -> None:
    found = set()
    for command in app.registered_commands:
        assert command.callback is not None
        hints = typing.get_type_hints(command.callback)
        paths = [name for name, hint in hints.items() if "Path" in str(hint)]
        found |= {(command.callback.__name__, name) for name in paths}
    assert len(found) > 30
    assert found - ELSEWHERE <= set(CASES)
