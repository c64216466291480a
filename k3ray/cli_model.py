"""The options of the commands that run or read a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3ray.cli_options import (
    CacheGb,
    Config,
    ExpertShardsWish,
    Json,
    Memory,
    ModelDir,
    Preset,
    Roots,
    StagesWish,
    Tape,
    TrunkGb,
    number_option,
    wishes_of,
)


def generate(
    context: typer.Context,
    model_dir: ModelDir = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt as text.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file whose bytes are the prompt, as they are.")] = None,
    ids: Annotated[str | None, typer.Option(help="The prompt as token ids: 3,5,7.")] = None,
    gen: Annotated[int, number_option("How many tokens to generate, 1 to 4096.")] = 8,
    tok: Annotated[
        Path | None,
        typer.Option(help="The vocabulary's folder. Default: K3_TOK_FILES, else MODEL_DIR."),
    ] = None,
    config: Config = None,
    layers: Annotated[
        int | None,
        number_option("Run only the first so many layers."),
    ] = None,
    stages: StagesWish = None,
    expert_shards: ExpertShardsWish = None,
    threads: Annotated[
        int | None,
        number_option("Threads of all processes together. Default: OMP_NUM_THREADS, else the physical cores allowed."),
    ] = None,
    incremental: Annotated[
        bool, typer.Option(help="Keep state between tokens, or run the whole sequence for each (same bits).")
    ] = True,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-message id.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the run as JSON to this file.")] = None,
    dump_logits: Annotated[
        Path | None, typer.Option(help="Write the first step's logits, float32, to this file.")
    ] = None,
    dump_cache_trace: Annotated[
        Path | None,
        typer.Option(help="Write the expert requests, for simulate-cache, into this folder."),
    ] = None,
    tape: Tape = None,
    mirror: Annotated[
        list[Path] | None,
        typer.Option(help="A copy of the checkpoint, for an expert that cannot be read."),
    ] = None,
    memory: Memory = None,
    preset: Preset = None,
    trunk_gb: TrunkGb = None,
    cache_gb: CacheGb = None,
    load_state: Annotated[
        Path | None,
        typer.Option(help="Go on with the sequence saved in this file; a prompt comes after it."),
    ] = None,
    save_state: Annotated[
        Path | None,
        typer.Option(help="Save the sequence and its state to this file, also at Ctrl-C."),
    ] = None,
    snapshot_every: Annotated[
        int,
        number_option("Steps between snapshots, against deaths; 0: none."),
    ] = 64,
    max_recoveries: Annotated[int, number_option("How often processes that died may be replaced.")] = 3,
    plan: Annotated[
        Path | None,
        typer.Option(help="Who gets what on which node: what k3ray plan --out wrote."),
    ] = None,
    roots: Roots = None,
    list_presets: Annotated[
        bool, typer.Option("--list-presets", help="Show the presets with their arithmetic, and run nothing.")
    ] = False,
) -> None:
    """Generate text greedily from a prompt."""
    if list_presets:
        from k3ray.commands.budget import run as run_budget

        run_budget(model_dir, wishes_of(context), stages or 1, expert_shards or 0, gen, tape, as_json=False)
        return
    from k3ray.commands.generate import GenerateRequest, run

    run(
        GenerateRequest(
            model_dir, prompt, prompt_file, ids, gen, tok, config, layers, stages, expert_shards, threads,
            incremental, ignore_eos, out, dump_logits, dump_cache_trace, tape, tuple(mirror or ()), wishes_of(context),
            load_state, save_state, snapshot_every, max_recoveries, plan, roots,
        )
    )  # fmt: skip


def inspect(model_dir: ModelDir = None, json: Json = False) -> None:
    """Print a checkpoint's census: its tensors by kind, what the text model binds and what is left."""
    from k3ray.commands.inspect import run

    run(model_dir, json)


def selfcheck(model_dir: ModelDir = None, json: Json = False) -> None:
    """Prove on this machine that every way of running a model gives the same bits."""
    from k3ray.commands.selfcheck import run

    run(model_dir, json)


def make_checkpoint(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist, or be empty.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A width, like hidden_size=256; may be given again."),
    ] = None,
    released: Annotated[bool, typer.Option("--released", help="Begin from the released widths.")] = False,
    layers: Annotated[int | None, number_option("How many layers.")] = None,
    experts: Annotated[
        int | None,
        number_option("How many routed experts a layer."),
    ] = None,
    seed: Annotated[int, number_option("The same seed makes the same bytes.")] = 0,
) -> None:
    """Write a seeded synthetic checkpoint of any widths in the released format."""
    from k3ray.commands.make_checkpoint import run

    run(out, set_ or [], released, layers, experts, seed)
