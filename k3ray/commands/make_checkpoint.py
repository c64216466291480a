"""k3ray make-checkpoint: a seeded synthetic checkpoint of any widths in the released format."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from k3ray.amounts import decimal_size
from k3ray.commands.terminal import Progress, say
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec, released_spec
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure


class SyntheticOptionFailure(Failure):
    """A --set that names no width, or gives a value of the wrong kind."""

    exit_code = 2


def run(out: Path, assignments: list[str], released: bool, layers: int | None, experts: int | None, seed: int) -> None:
    """Write the checkpoint and say what comes next."""
    spec = released_spec(5, 24) if released else SyntheticSpec()
    named: dict[str, Any] = {"num_hidden_layers": layers, "num_experts": experts}
    changes = {name: value for name, value in named.items() if value is not None}
    spec = replace(spec, **changes, **dict(parse_assignment(text) for text in assignments))
    with Progress("writing") as progress:
        summary = write_checkpoint(out, spec, seed, progress.update)
    say(
        f"wrote {out}: {decimal_size(summary.file_bytes)} in {counted(summary.num_shards, 'shard')}; "
        f"next: k3ray inspect {out}"
    )


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return the field of SyntheticSpec and its value from "hidden_size=256"."""
    name, _, value = text.partition("=")
    known = {field.name: field.type for field in fields(SyntheticSpec)}
    if name not in known:
        raise SyntheticOptionFailure(f"--set {text}: there is no width {name!r}; there are {', '.join(sorted(known))}")
    if known[name] == "str" or "Literal" in str(known[name]):
        return name, value
    try:
        parsed = json.loads(value)
    except ValueError:
        raise SyntheticOptionFailure(f"--set {text}: {value!r} is not a number, true, false or a list") from None
    return name, tuple(parsed) if isinstance(parsed, list) else parsed
