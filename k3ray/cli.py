"""The command line's entry: which commands there are, what a failure prints and which code it ends with."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from k3ray import cli_checkpoint, cli_cluster, cli_memory, cli_model, cli_proof
from k3ray.standard_streams import StandardStreams
from k3ray.workers.failure import Failure

app = typer.Typer(
    name="k3ray",
    help="Run Kimi K3 exactly, on CPUs, with the same bits on one process and on many.",
    epilog="Begin with: k3ray generate --prompt 'Hello' (the embedded model), then k3ray selfcheck.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command(epilog="Example: k3ray generate /models/kimi-k3 --prompt 'The capital of France is' --out run.json")(
    cli_model.generate
)
app.command(epilog="Example: k3ray download /models/kimi-k3 --workers 8")(cli_checkpoint.download)
app.command(epilog="Example: k3ray verify /models/kimi-k3 --deep --repair")(cli_checkpoint.verify)
app.command(epilog="Example: k3ray inspect /models/kimi-k3 --json")(cli_model.inspect)
app.command(epilog="Example: k3ray pack /models/kimi-k3 /nvme/kimi-k3.tape --verify")(cli_memory.pack)
app.command(epilog="Example: k3ray budget /models/kimi-k3 --memory 24G")(cli_memory.budget)
app.command(epilog="Example: k3ray doctor /models/kimi-k3 --tape /nvme/kimi-k3.tape")(cli_memory.doctor)
app.command(epilog="Example: k3ray devbw /models/kimi-k3")(cli_memory.devbw)
app.command(epilog="Example: k3ray simulate-cache expert_trace.bin --capacity 8GB --capacity 64GB --plot hits.png")(
    cli_memory.simulate_cache
)
app.command(epilog="Example: k3ray nodes /models/kimi-k3 --roots roots.toml")(cli_cluster.nodes)
app.command(epilog="Example: k3ray plan /models/kimi-k3 --cluster cluster.toml --out plan.json")(cli_cluster.plan)
app.command(epilog="Example: k3ray selfcheck")(cli_model.selfcheck)
app.command(epilog="Example: k3ray audit /models/kimi-k3 --out audit.json --page audit.html")(cli_proof.audit)
app.command(epilog="Example: k3ray conform /models/kimi-k3 --layer 3 --log conform.log")(cli_proof.conform)
app.command(epilog="Example: k3ray compare-logits a.f32 b.f32 --tolerance 2e-3")(cli_proof.compare_logits)
app.command(hidden=True, epilog="Example: k3ray make-checkpoint /tmp/model --layers 8 --set hidden_size=2048")(
    cli_model.make_checkpoint
)

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line; a failure that the user can act on is one message, never a traceback."""
    streams = StandardStreams()
    try:
        code = _run()
    except OSError as error:
        lost = streams.lost_answer()
        if lost is None or lost.errno != error.errno:
            raise
        code = 1
    lost = streams.lost_answer()
    if lost is not None and not isinstance(lost, BrokenPipeError):  # a reader who has seen enough need not be told
        _tell(f"standard output: {lost.strerror}; what was to be printed is not all there")
    sys.exit(code or (1 if lost is not None else 0))


def _run() -> int:
    """Do what the arguments ask for, say why where it cannot be done; the exit code."""
    try:
        code = int(app(standalone_mode=False) or 0)
    except Failure as failure:
        _tell(str(failure))
        return failure.exit_code
    except typer.Exit as ending:
        code = ending.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # the option parser's own usage errors
            if message := error.format_message():  # empty where the help was printed instead
                _tell(f"{message} (see k3ray --help)")
            return 2
        raise
    if code == INTERRUPTED:
        _tell("interrupted; nothing is left running")
    return code


def _tell(message: str) -> None:
    print(f"k3ray: {message}", file=sys.stderr)
