"""An answer that cannot be shown ends the run as a failure, so that what is saved of it is written; said once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
