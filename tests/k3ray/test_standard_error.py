"""Messages that cannot be written, on a full disk or to a reader that is gone, change nothing else about a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = "import sys; from k3ray.cli import main; sys.argv = ['k3ray', *sys.argv[1:]]; main()"
NOISE = """
import sys
from k3ray import cli
def noise(standalone_mode):
    print("a message", file=sys.stderr, flush=True)
    sys.stderr.write("the end of a line that never ends")
    print("the answer")
    if sys.argv[1] == "failure":
        raise cli.Failure("why")
    if sys.argv[1] == "error":
        raise ValueError("a mistake of ours")
cli.app = noise
cli.main()
"""


@pytest.mark.parametrize(("ending", "code"), [("well", 0), ("failure", 1), ("error", 1)])
@pytest.mark.parametrize("lost", ["full disk", "closed pipe", "heard"])
def test_lost_messages_leave_the_exit_code_and_the_answer(ending: str, code: int, lost: str) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full:
        to = {"full disk": full.fileno(), "closed pipe": pipe, "heard": subprocess.PIPE}[lost]
        command = [sys.executable, "-c", NOISE, ending]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=to, text=True, timeout=60, check=False)
    os.close(pipe)
    assert (done.returncode, done.stdout) == (code, "the answer\n")
    if lost == "heard":
        assert done.stderr.startswith("a message\nthe end of a line that never ends")
        last = {"well": "ever ends", "failure": "k3ray: why\n", "error": "ValueError: a mistake of ours\n"}[ending]
        assert done.stderr.endswith(last)


@pytest.mark.parametrize(
    ("arguments", "code"), [(["inspect"], 0), (["inspect", "/nowhere"], 2), (["--nonsense"], 2), (["nodes", "-x"], 2)]
)
def test_commands_whose_messages_are_lost(arguments: list[str], code: int) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", COMMAND, *arguments]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, timeout=60, check=False)
    assert done.returncode == code


def test_a_reader_who_is_slow_gets_every_line() -> None:
    """A pipe that another program made non-blocking is full for a moment; nothing of what follows is dropped."""
    program = (
        "import os, sys; from k3ray import cli; os.set_blocking(2, False)\n"
        "cli.app = lambda standalone_mode: [print('x' * 999, file=sys.stderr) for _ in range(300)] and None\n"
        "cli.main()"
    )
    reader, pipe = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", program], stderr=pipe)
    os.close(pipe)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits, as the pipe holds 64 kB
        child.wait(2)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == (b"x" * 999 + b"\n") * 300
    assert child.wait(30) == 0
