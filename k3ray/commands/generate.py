"""k3ray generate: the text to standard output as it comes, everything said about the run to standard error."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from k3ray.api import Model, Token, open_model
from k3ray.cluster.wishes import merge_wishes
from k3ray.cluster_report import report_lines
from k3ray.commands.terminal import StandardOutputLost, print_now, say
from k3ray.files import check_distinct, check_writable, make_folder, write_file
from k3ray.prompt import check_gen, parse_ids
from k3ray.report import Generation
from k3ray.state_file import open_state
from k3ray.workers.cache.trace import ExpertRequest, encode_trace
from k3ray.workers.failure import Failure

EXPERT_DAMAGED = 4


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The command's options, as they were given."""

    model_dir: Path | None
    prompt: str | None
    prompt_file: Path | None
    ids: str | None
    gen: int
    tok: Path | None
    config: Path | None
    layers: int | None
    stages: int | None
    expert_shards: int | None
    threads: int | None
    incremental: bool
    ignore_eos: bool
    out: Path | None
    dump_logits: Path | None
    dump_cache_trace: Path | None
    tape: Path | None
    mirror: tuple[Path, ...]
    wishes: tuple[tuple[str, str], ...]
    load_state: Path | None
    save_state: Path | None
    snapshot_every: int
    max_recoveries: int
    plan: Path | None
    roots: Path | None


def run(request: GenerateRequest) -> None:
    """Check everything, start, stream, summarise, write; raises typer.Exit(4) when a damaged expert was used."""
    check_gen(request.gen)
    _check_outputs(request)
    model = _open(request)
    ids = parse_ids(request.ids) if request.ids is not None else None
    prompt = None if request.prompt is None else os.fsencode(request.prompt)  # the bytes that were typed
    prompt_ids = model.prompt_ids(prompt, request.prompt_file, ids, optional=request.load_state is not None)
    try:
        with model:
            if request.dump_cache_trace is not None:
                saved = open_state(request.load_state).ids if request.load_state is not None else []
                model.record_routing(len(saved) + len(prompt_ids) + request.gen)
            generation = model.generate(
                ids=prompt_ids or None,
                gen=request.gen,
                incremental=request.incremental,
                ignore_eos=request.ignore_eos,
                on_token=_show_text if model.tokenizer is not None else _show_id,
                save_state=request.save_state,
                load_state=request.load_state,
            )
            if request.dump_cache_trace is not None:
                _write_trace(request.dump_cache_trace, model.recorded_routing())
    except (Failure, KeyboardInterrupt):
        if model.partial is not None:  # what came before is sound: keep it
            print_now("\n")
            _write(request, model.partial, model.saved)
        elif model.saved:
            say(model.saved)
        raise
    with suppress(StandardOutputLost):  # of an end of a line only: what follows is still to be written
        print_now("\n")
    _write(request, generation, model.saved)
    if generation.damaged_experts:
        experts = ", ".join(f"layer {layer} expert {expert}" for layer, expert in generation.damaged_experts)
        say(f"damaged: NaN scale bytes in {experts}; their groups counted as zero, so this text is not the model's. "
            "Fetch the shards of these experts again")  # fmt: skip
        raise typer.Exit(EXPERT_DAMAGED)


def _check_outputs(request: GenerateRequest) -> None:
    """Refuse, before any work, what could not be written after it."""
    outputs = {"--out": request.out, "--dump-logits": request.dump_logits, "--save-state": request.save_state}
    for option, path in outputs.items():
        if path is not None:
            check_writable(path, option)
    check_distinct(outputs, {"--prompt-file": request.prompt_file, "--config": request.config})
    reports = {**outputs, "--save-state": None}  # a state may be saved in the place of the one that was loaded
    check_distinct(reports, {"--load-state": request.load_state})
    if request.dump_cache_trace is not None:
        make_folder(request.dump_cache_trace, "--dump-cache-trace")


def _open(request: GenerateRequest) -> Model:
    """The model as the options ask for it; nothing is started yet."""
    return open_model(
        request.model_dir,
        config=request.config,
        layers=request.layers,
        stages=request.stages,
        expert_shards=request.expert_shards,
        threads=request.threads,
        tok=request.tok,
        tape=request.tape,
        mirror=request.mirror,
        wishes=merge_wishes(request.wishes),
        snapshot_every=request.snapshot_every,
        max_recoveries=request.max_recoveries,
        plan=request.plan,
        roots=request.roots,
        say=say,
    )


def _show_text(token: Token) -> None:
    print_now(token.text)


def _show_id(token: Token) -> None:
    print_now(f"{token.token_id} ")


def _write_trace(folder: Path, requests: list[ExpertRequest]) -> None:
    """Write the requests in the recorded format, and how often each expert of each layer was asked for."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for request in requests:
        counts[request.layer].update(request.experts)
    histogram = {
        str(layer): {str(expert): counts[layer][expert] for expert in sorted(counts[layer])} for layer in counts
    }
    write_file(folder / "expert_trace.bin", encode_trace(requests))
    write_file(folder / "expert_hist.json", json.dumps(histogram, indent=1).encode() + b"\n")
    say(f"wrote {folder}/expert_trace.bin and expert_hist.json; next: k3ray simulate-cache {folder}/expert_trace.bin")


def _write(request: GenerateRequest, generation: Generation, saved: str) -> None:
    if request.out is not None:
        text = json.dumps(generation.as_json(), indent=1, ensure_ascii=False)
        write_file(request.out, text.encode("utf-8", "surrogatepass") + b"\n")
        say(f"wrote {request.out}")
    if request.dump_logits is not None:
        write_file(request.dump_logits, generation.first_logits.astype("<f4").tobytes())
        say(f"wrote {request.dump_logits}: {len(generation.first_logits)} float32")
    if saved:
        say(saved)
    for recovery in generation.recoveries:
        say(recovery.describe())
    for line in report_lines(tuple(generation.nodes), generation.messages):
        say(line)
    say(generation.disk_line())
    say(generation.time_line())
    say(generation.summary())
