"""k3ray selfcheck: each gate on a line as it is decided, and exit code 0 only when all of them hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from k3ray.commands.terminal import say
from k3ray.selfcheck import Gate, selfcheck


def run(model_dir: Path | None, as_json: bool) -> None:
    """Run every gate; raises typer.Exit(1) when one of them fails."""
    gates: list[Gate] = []
    for gate in selfcheck(model_dir, say):
        gates.append(gate)
        if not as_json:
            print(f"{'PASS' if gate.passed else 'FAIL'}  {gate.name}: {gate.counted}", flush=True)
    failed = [gate.name for gate in gates if not gate.passed]
    if as_json:
        print(json.dumps({"passed": not failed, "gates": [asdict(gate) for gate in gates]}, indent=1))
    if failed:
        say(
            f"selfcheck: {len(failed)} of {len(gates)} gates failed: {', '.join(failed)}; trust no text of this machine"
        )
        raise typer.Exit(1)
    say(f"selfcheck: all {len(gates)} gates hold; next: k3ray generate --prompt 'Hello'")
