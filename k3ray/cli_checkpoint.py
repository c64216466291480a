"""The options of the commands that get a checkpoint and prove it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3ray.cli_options import Json, number_option

Endpoint = Annotated[
    str | None,
    typer.Option(help="A hub's or mirror's address. Default: HF_ENDPOINT, else huggingface.co."),
]


def download(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to download to; made if missing.")],
    tokenizer_only: Annotated[
        bool, typer.Option("--tokenizer-only", help="Only the tokenizer's two files, 2.8 MB.")
    ] = False,
    layers: Annotated[
        str | None,
        typer.Option(metavar="A-B", help="Only the shards of these zero-based layers."),
    ] = None,
    workers: Annotated[int, number_option("Files at once.")] = 4,
    endpoint: Endpoint = None,
    repo: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Another repository than the release's."),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            help="A commit of 40 digits, or a branch or tag to be resolved once. Default: the pinned release."
        ),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read finished files again and compare them.")] = False,
    stall_timeout: Annotated[int, number_option("Seconds of silence before a line is dropped.", "S")] = 30,
    json: Json = False,
) -> None:
    """Download a checkpoint, or part of it; run it again to go on where it stopped.

    HF_TOKEN, where it is set, goes to the endpoint and nowhere else.
    """
    from k3ray.commands.download import run

    run(directory, repo, revision, endpoint, tokenizer_only, layers, workers, deep, stall_timeout, json)


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's folder.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read every file and compare its checksum.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Fetch exactly what is wrong again.")] = False,
    scales: Annotated[
        bool, typer.Option(help="Look for NaN in the scales: 5.5 % of the bytes are read, 85 GB of the release.")
    ] = True,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Prove a checkpoint: counts, sizes, headers, index, scales, vocabulary, checksums. PASS, or FAIL with exit code 1.

    Works without a network; what cannot be checked is said.
    """
    from k3ray.commands.verify import run

    run(directory, deep, repair, scales, endpoint, json)
