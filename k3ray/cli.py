"""The command line's entry: the commands' names and options; what a failure prints and which code it ends with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

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

INTERRUPTED = 130


def whole_number(text: str) -> int:
    """Return the whole number that an option was given."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"found {text!r}, expected a whole number") from None


WISHES = "k3ray.wishes"


def note_wish(context: typer.Context, option: typer.CallbackParam, value: str | None) -> str | None:
    """Keep a memory option with its place on the command line: a later one wins over an earlier one."""
    if value is not None:
        context.meta.setdefault(WISHES, []).append((option.opts[0], value))
    return value


ModelDir = Annotated[
    Path | None,
    typer.Argument(help="The checkpoint's folder. Default: K3_MODEL_DIR, else the embedded model.", show_default=False),
]
Config = Annotated[Path | None, typer.Option(help="A config.json elsewhere than in MODEL_DIR.", show_default=False)]


@app.command(epilog="Example: k3ray generate /models/kimi-k3 --prompt 'The capital of France is' --out run.json")
def generate(
    context: typer.Context,
    model_dir: ModelDir = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt as text.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file whose bytes are the prompt, as they are.", show_default=False)
    ] = None,
    ids: Annotated[str | None, typer.Option(help="The prompt as token ids: 3,5,7.", show_default=False)] = None,
    gen: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="How many tokens to generate, 1 to 4096.")
    ] = 8,
    tok: Annotated[
        Path | None,
        typer.Option(help="The vocabulary's folder. Default: K3_TOK_FILES, else MODEL_DIR.", show_default=False),
    ] = None,
    config: Config = None,
    layers: Annotated[
        int | None,
        typer.Option(parser=whole_number, metavar="N", help="Run only the first so many layers.", show_default=False),
    ] = None,
    stages: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Processes that share the layers.")] = 1,
    expert_shards: Annotated[
        int,
        typer.Option(
            parser=whole_number, metavar="N", help="Processes that hold the routed experts; 0: the stages hold them."
        ),
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help="Threads of all processes together. Default: OMP_NUM_THREADS, else the physical cores allowed.",
            show_default=False,
        ),
    ] = None,
    incremental: Annotated[
        bool, typer.Option(help="Keep state between tokens, or run the whole sequence for each (same bits).")
    ] = True,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-message id.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the run as JSON to this file.", show_default=False)] = None,
    dump_logits: Annotated[
        Path | None, typer.Option(help="Write the first step's logits, float32, to this file.", show_default=False)
    ] = None,
    tape: Annotated[
        Path | None, typer.Option(help="What k3ray pack wrote, to stream the trunk from.", show_default=False)
    ] = None,
    mirror: Annotated[
        list[Path] | None,
        typer.Option(help="A copy of the checkpoint, for an expert that cannot be read.", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(callback=note_wish, help="Memory of all processes here, like 24G.", show_default=False),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            callback=note_wish,
            help="Memory by name: ultra, laptop, desktop, workstation, server, max, auto.",
            show_default=False,
        ),
    ] = None,
    trunk_gb: Annotated[
        str | None,
        typer.Option(callback=note_wish, help="Gigabytes of trunk to keep in memory, or auto.", show_default=False),
    ] = None,
    cache_gb: Annotated[
        str | None,
        typer.Option(callback=note_wish, help="Gigabytes of experts to keep in memory.", show_default=False),
    ] = None,
) -> None:
    """Generate text greedily from a prompt."""
    from k3ray.commands.generate import GenerateRequest, run

    run(
        GenerateRequest(
            model_dir, prompt, prompt_file, ids, gen, tok, config, layers, stages, expert_shards, threads,
            incremental, ignore_eos, out, dump_logits, tape, tuple(mirror or ()), tuple(context.meta.get(WISHES, ())),
        )
    )  # fmt: skip


@app.command(epilog="Example: k3ray inspect /models/kimi-k3 --json")
def inspect(
    model_dir: ModelDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print the census as JSON.")] = False,
) -> None:
    """Print a checkpoint's census: its tensors by kind, what the text model binds and what is left."""
    from k3ray.commands.inspect import run

    run(model_dir, json)


@app.command(epilog="Example: k3ray pack /models/kimi-k3 /nvme/kimi-k3.tape --verify")
def pack(
    model_dir: Annotated[Path, typer.Argument(help="The checkpoint's folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to make for the tape.")],
    config: Config = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every bit of the tape with the shards.")] = False,
) -> None:
    """Pack the trunk and the head in the order of their use, to be streamed from a disk."""
    from k3ray.commands.pack import run

    run(model_dir, out, verify, config)


@app.command(epilog="Example: k3ray selfcheck")
def selfcheck(
    model_dir: ModelDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print the gates as JSON.")] = False,
) -> None:
    """Prove on this machine that every way of running a model gives the same bits."""
    from k3ray.commands.selfcheck import run

    run(model_dir, json)


@app.command(
    hidden=True,
    epilog="Example: k3ray make-checkpoint /tmp/model --layers 8 --set hidden_size=2048",
)
def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="The folder to make; it must not exist, or be empty.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A width, like hidden_size=256; may be given again.", show_default=False),
    ] = None,
    released: Annotated[bool, typer.Option("--released", help="Begin from the released widths.")] = False,
    layers: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="How many layers.", show_default=False)
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(parser=whole_number, metavar="N", help="How many routed experts a layer.", show_default=False),
    ] = None,
    seed: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="The same seed makes the same bytes.")
    ] = 0,
) -> None:
    """Write a seeded synthetic checkpoint of any widths in the released format."""
    from k3ray.commands.make_checkpoint import run

    run(out, set_ or [], released, layers, experts, seed)


def main() -> NoReturn:
    """Run the command line; a failure that the user can act on is one message, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except Failure as failure:
        _tell(str(failure))
        sys.exit(failure.exit_code)
    except typer.Exit as ending:
        code = ending.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "format_message"):  # the option parser's own usage errors
            _tell(f"{error.format_message()} (see k3ray --help)")
            sys.exit(2)
        raise
    if code == INTERRUPTED:
        _tell("interrupted; nothing is left running")
    sys.exit(code or 0)


def _tell(message: str) -> None:
    print(f"k3ray: {message}", file=sys.stderr)
