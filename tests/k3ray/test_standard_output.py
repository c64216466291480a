"""An answer that cannot be shown ends the run as a failure, so that what is saved of it is written; said once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import sys
from k3ray.commands.terminal import StandardOutputLost, print_now
try:
    print_now("one")
except StandardOutputLost as failure:
    print(f"{failure.exit_code}: {failure}", file=sys.stderr)
print_now("two")
"""


def test_a_full_disk_and_a_closed_pipe_are_told_once() -> None:
    for reason in ("No space left on device", "Broken pipe"):
        command = [sys.executable, "-c", CHILD]
        if reason == "Broken pipe":
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert child.stdout is not None and child.stderr is not None
            child.stdout.close()  # long before a child that has yet to start prints
            errors = child.stderr.read()
            child.stderr.close()
            assert child.wait() == 0
        else:
            with Path("/dev/full").open("w") as full:
                errors = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=True).stderr
        assert errors.splitlines() == [
            f"1: standard output: {reason}; the run was ended, and what was generated until then is kept where "
            "--out or --save-state was given"
        ]


COMMAND = "import sys; from k3ray.cli import main; sys.argv = ['k3ray', *sys.argv[1:]]; main()"


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["--help"], ["nodes", "--help"]])
@pytest.mark.parametrize("lost", ["full disk", "closed pipe"])
def test_every_command_ends_with_1_and_no_traceback(arguments: list[str], lost: str) -> None:
    """A disk that is full is said in the last line; whoever reads no further (`| head -1`) has seen enough."""
    reader, pipe = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full:
        to = full.fileno() if lost == "full disk" else pipe
        command = [sys.executable, "-c", COMMAND, *arguments]
        done = subprocess.run(command, stdout=to, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(pipe)
    told = [line for line in done.stderr.splitlines() if not line.startswith(("model: ", "bound: "))]
    expected = "k3ray: standard output: No space left on device; what was to be printed is not all there"
    assert (done.returncode, told) == (1, [expected] if lost == "full disk" else [])


def _with_a_full_disk(work: str) -> list[str]:
    """The last lines of standard error of a command whose work is this and whose answer finds no room."""
    program = f"from k3ray import cli\ndef work(standalone_mode):\n    {work}\ncli.app = work\ncli.main()"
    with Path("/dev/full").open("w") as full:
        command = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-c", program]  # what is printed is held back
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()[-2:]


def test_another_failure_is_told_beside_a_lost_output() -> None:
    lost = "k3ray: standard output: No space left on device; what was to be printed is not all there"
    assert _with_a_full_disk("print('held back'); raise cli.Failure('why')") == ["k3ray: why", lost]
    assert _with_a_full_disk("print('held back')") == [lost]
    # a mistake of ours is not taken for a lost output
    assert "No such file" in _with_a_full_disk("print('held back'); open('/nowhere')")[-1]
