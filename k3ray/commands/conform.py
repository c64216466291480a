"""k3ray conform: every layer against the PyTorch reference, a line each, and exit code 0 only when all agree."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import typer

from k3ray.cluster.machine import physical_cores
from k3ray.commands.terminal import say
from k3ray.conform.conformance import TOLERANCES, Conformance, LayerReport, Tolerances
from k3ray.conform.inputs import Inputs, RecordedPrompt, Recording, random_inputs
from k3ray.conform.own_side import OwnModel
from k3ray.conform.reference import PRECISIONS, open_reference
from k3ray.conform.report import HEADER, as_json, conclusion, log_lines, table_line
from k3ray.environment import read_environment
from k3ray.files import check_writable, write_file
from k3ray.model_source import find_model
from k3ray.prompt import parse_ids
from k3ray.workers.failure import Failure

MOST_TOKENS = 512  # the reference computes attention of all tokens with all, and the recurrence token by token


class ConformUsage(Failure):
    """Options that do not go together or lie outside what there is."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ConformRequest:
    """The command's options, as they were given."""

    model_dir: Path | None
    config: Path | None
    layers: tuple[int, ...]
    every_layer: bool
    inputs: str
    ids: str | None
    tokens: int
    seed: int
    precision: str
    tolerance: float | None
    reference: Path | None
    save_inputs: Path | None
    log: Path | None
    as_json: bool


def run(request: ConformRequest) -> None:
    """Check everything, compare, print, write; raises typer.Exit(1) when a layer or a prompt fails."""
    tolerances = _check(request)
    environment = read_environment()
    source = find_model(request.model_dir, None, environment)
    threads = environment.threads or len(physical_cores())
    config_path = request.config or source.model_dir / "config.json"
    own = OwnModel(source.model_dir, request.config, threads)
    layers = _layers(request, own.config.num_hidden_layers)
    inputs, prompts = _inputs(request, own, whole=len(layers) == own.config.num_hidden_layers)
    reference = open_reference(request.reference, source.model_dir, config_path, request.precision, threads)
    say(source.describe())
    about = {
        "model": str(source.model_dir),
        "reference": f"PyTorch {version('torch')}, {request.precision}",
        "inputs": request.inputs,
        "threads": threads,
        "tolerances": asdict(tolerances),
        "k3ray": version("k3ray"),
    }
    conformance = Conformance(own, reference, tolerances, keep_entered=request.save_inputs is not None)
    reports: list[LayerReport] = []
    try:
        for report in _shown(conformance.run(layers, inputs, prompts), request.as_json):
            reports.append(report)
    except (KeyboardInterrupt, Failure):  # what was compared before is sound: keep it
        _write_log(request, reports, {**about, "interrupted": f"after {len(reports)} lines"})
        raise
    _write_log(request, reports, about)
    if request.save_inputs is not None:
        _save(request.save_inputs, conformance)
    if request.as_json:
        print(json.dumps(as_json(reports, about), indent=1))
    usual = TOLERANCES[request.precision].layer
    if tolerances.layer > usual:
        say(f"--tolerance {tolerances.layer:g} is {tolerances.layer / usual:.0f} times the usual {usual:g}: what is "
            "smaller than that was not found")  # fmt: skip
    say(conclusion(reports))
    if not all(report.passed for report in reports):
        say("trust no text of this build and checkpoint; the first array beyond its tolerance is where to look"
            + ("" if request.log else " (--log FILE has them all)"))  # fmt: skip
        raise typer.Exit(1)
    golden = source.model_dir / "golden.npz"
    recorded = f"conform {source.model_dir} --inputs {golden}"
    say(
        f"next: k3ray {recorded if request.inputs == 'random' and golden.is_file() else f'generate {source.model_dir}'}"
    )


def _check(request: ConformRequest) -> Tolerances:
    if request.precision not in PRECISIONS:
        raise ConformUsage(f"--precision {request.precision}: expected {' or '.join(PRECISIONS)}")
    if request.every_layer and request.layers:
        raise ConformUsage("--layer and --all exclude each other: leave one out")
    if not 1 <= request.tokens <= MOST_TOKENS:
        raise ConformUsage(f"--tokens {request.tokens}: expected 1 to {MOST_TOKENS}")
    if request.seed < 0:
        raise ConformUsage(f"--seed {request.seed}: expected 0 or more")
    if request.ids is not None and request.layers:
        raise ConformUsage("--ids runs a prompt through the whole model: leave --layer out")
    if request.save_inputs is not None and request.ids is None:
        raise ConformUsage("--save-inputs saves what entered each layer for the prompt of --ids: give --ids")
    for option, path in (("--log", request.log), ("--save-inputs", request.save_inputs)):
        if path is not None:
            check_writable(path, option)
    tolerances = TOLERANCES[request.precision]
    if request.tolerance is None:
        return tolerances
    if not 0 <= request.tolerance < 1:
        raise ConformUsage(f"--tolerance {request.tolerance}: expected a relative error from 0 to below 1")
    return replace(tolerances, layer=request.tolerance)


def _layers(request: ConformRequest, count: int) -> list[int]:
    for layer in request.layers:
        if not 0 <= layer < count:
            raise ConformUsage(f"--layer {layer}: this model has the layers 0 to {count - 1}")
    return sorted(set(request.layers)) or list(range(count))


def _inputs(request: ConformRequest, own: OwnModel, whole: bool) -> tuple[Inputs, list[RecordedPrompt]]:
    prompts: list[RecordedPrompt] = []
    if request.inputs == "random":
        inputs: Inputs = partial(random_inputs, own.config, tokens=request.tokens, seed=request.seed)
    else:
        recording = Recording(Path(request.inputs), own.config, own.embed)
        inputs = recording.layer
        if recording.is_golden and whole:
            prompts = recording.prompts()
    if request.ids is not None:
        ids = parse_ids(request.ids)
        if not 1 <= len(ids) <= MOST_TOKENS:
            raise ConformUsage(f"--ids: found {len(ids)} ids, expected 1 to {MOST_TOKENS}")
        prompts.insert(0, RecordedPrompt("ids", ids, np.empty((0, 0), np.float32)))
    return inputs, prompts


def _shown(reports: Iterator[LayerReport], quiet: bool) -> Iterator[LayerReport]:
    """Print each line as it is decided: on standard error when standard output is for JSON."""
    tell = say if quiet else partial(print, flush=True)
    tell(HEADER)
    for report in reports:
        tell(table_line(report))
        yield report


def _write_log(request: ConformRequest, reports: Sequence[LayerReport], about: dict[str, Any]) -> None:
    if request.log is None:
        return
    lines = [f"{name}: {value}" for name, value in about.items()]
    for report in reports:
        lines += ["", *log_lines(report)]
    ending = f"interrupted {about['interrupted']}; until then " if "interrupted" in about else ""
    write_file(request.log, "\n".join([*lines, "", ending + conclusion(reports), ""]).encode())
    say(f"wrote {request.log}")


def _save(path: Path, conformance: Conformance) -> None:
    """Write what entered each layer, so that single layers can be compared on it later, or elsewhere."""
    arrays: dict[str, Any] = {}
    for layer, (prefix, blocks) in conformance.entered.items():
        arrays |= {f"prefix_L{layer}": prefix, f"blocks_L{layer}": blocks}
    archive = io.BytesIO()
    np.savez(archive, **arrays)
    write_file(path, archive.getvalue())
    say(f"wrote {path}; next: k3ray conform --inputs {path}")
