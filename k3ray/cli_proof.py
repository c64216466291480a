"""The options of the commands that prove: by an audit, against a reference, against other logits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3ray.cli_options import Config, Json, ModelDir, number_option


def conform(
    model_dir: ModelDir = None,
    layer: Annotated[
        list[int] | None,
        number_option("Only this layer, from 0; may be given again."),
    ] = None,
    every_layer: Annotated[bool, typer.Option("--all", help="All layers; so it is without --layer, too.")] = False,
    inputs: Annotated[
        str,
        typer.Option(metavar="random|FILE.npz", help="What each layer is fed: a golden.npz or --save-inputs' file."),
    ] = "random",
    ids: Annotated[
        str | None,
        typer.Option(help="Run these token ids through the whole model too, up to logits."),
    ] = None,
    tokens: Annotated[int, number_option("Random tokens a layer, 1 to 512.")] = 12,
    seed: Annotated[int, number_option("Of the random inputs.")] = 0,
    precision: Annotated[str, typer.Option(help="The reference's arithmetic: float64 or float32.")] = "float64",
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest relative error of a layer. Default: by precision."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="The PyTorch reference's folder. Default: this source tree's."),
    ] = None,
    config: Config = None,
    save_inputs: Annotated[Path | None, typer.Option(help="Save what entered each layer for --ids, as .npz.")] = None,
    log: Annotated[Path | None, typer.Option(help="Write every array's errors to this file.")] = None,
    json: Json = False,
) -> None:
    """Compare each layer, and a whole prompt, with a PyTorch reference written from the formulas alone."""
    from k3ray.commands.conform import ConformRequest, run

    run(
        ConformRequest(
            model_dir, config, tuple(layer or ()), every_layer, inputs, ids, tokens, seed, precision, tolerance,
            reference, save_inputs, log, json,
        )
    )  # fmt: skip


def compare_logits(
    a: Annotated[
        str, typer.Argument(metavar="A", help="Logits: raw float32 (--dump-logits), .npy, .json, FILE.npz:ARRAY.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The logits to compare with them.")],
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference of two logits. Default: equal bits."),
    ] = None,
    max_kl: Annotated[float | None, typer.Option(help="Largest divergence, in nats, either way.")] = None,
    json: Json = False,
) -> None:
    """Say how far two files of logits are from each other."""
    from k3ray.commands.compare_logits import run

    run(a, b, tolerance, max_kl, json)


def audit(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint's folder (config and index are enough), or its http(s) address, read by ranges only: "
            "https://huggingface.co/OWNER/NAME/resolve/COMMIT. Default: K3_MODEL_DIR, else the embedded model.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the snapshot as JSON.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the snapshot as one self-contained HTML page.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers whose small tensors are read, from 0: 0-3,17 or all. Default: 1, 2, the middle and the last; "
            "over http no more than 1 % of the files."
        ),
    ] = None,
    probe: Annotated[bool, typer.Option(help="Send synthetic inputs through the routers that were read.")] = True,
    json: Json = False,
) -> None:
    """Close a checkpoint's config, index and headers against each other, and say what is observed and what derived."""
    from k3ray.commands.audit import AuditRequest, run

    run(AuditRequest(source, out, page, layers, probe, json))
