"""A command whose standard streams were closed (`k3ray ... 2>&-`): nothing goes where it does not belong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import os, sys
from k3ray import cli
cli.app = lambda standalone_mode: print(open("/dev/zero").fileno() > 2, file=open(sys.argv[1], "w"))
cli.main()
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_files_do_not_get_the_number_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, PROBE, str(tmp_path / "said")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == "True\n"


def test_messages_do_not_go_to_standard_output_instead() -> None:
    program = "import sys; from k3ray.cli import main; sys.argv = ['k3ray', 'inspect', '/nowhere']; main()"
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
