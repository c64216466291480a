"""k3ray simulate-cache: a recorded trace of expert requests replayed at cache sizes, as a table, JSON or a plot."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3ray.cluster.wishes import parse_size
from k3ray.commands.terminal import say
from k3ray.files import check_writable, write_file
from k3ray.workers.cache.simulate import OPTIMUM, Replay, simulate
from k3ray.workers.cache.trace import ExpertRequest, decoding_order, read_trace, recorded_order
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure

RELEASED_EXPERT_BYTES = 17_547_264
DEFAULT_CAPACITIES = ("4GB", "8GB", "13GB", "16GB", "24GB", "32GB", "64GB", "128GB", "192GB")
ORDERS = {"decoding": decoding_order, "recorded": recorded_order}
TITLES = {"lru": "LRU", "circle": "circle", OPTIMUM: "optimum"}


class SimulationFailure(Failure):
    """The simulation cannot be run or drawn as it was asked for."""

    exit_code = 2


def run(
    trace: Path,
    capacities: Sequence[str],
    order: str = "decoding",
    expert_bytes: int = RELEASED_EXPERT_BYTES,
    experts_per_token: int | None = None,
    plot: Path | None = None,
    as_json: bool = False,
) -> None:
    """Replay the trace with LRU, the circle policy and Belady's optimum; everything is checked before the replay."""
    if order not in ORDERS:
        raise SimulationFailure(f"--order: found {order!r}, expected one of {', '.join(ORDERS)}")
    if expert_bytes < 1:
        raise SimulationFailure(f"--expert-bytes: found {expert_bytes}, expected the bytes of one expert, at least 1")
    sizes = sorted({parse_size(text, "--capacity") for text in capacities or DEFAULT_CAPACITIES})
    if plot is not None:
        check_writable(plot, "--plot")
        _figure_class()
    requests = ORDERS[order](read_trace(trace, experts_per_token))
    say(f"{trace}: {_describe(requests)}, in {order} order")
    replays = simulate(requests, sizes, expert_bytes)
    if plot is not None:
        write_file(plot, _draw(replays, order))
        say(f"drawn: {plot}")
    if as_json:
        print(json.dumps(_document(trace, order, requests, replays), indent=1))
    else:
        Console(width=None if Console().is_terminal else 110).print(_table(replays))


def _describe(requests: Sequence[ExpertRequest]) -> str:
    layers = len({request.layer for request in requests})
    width = max(len(request.experts) for request in requests)
    distinct = len({(request.layer, expert) for request in requests for expert in request.experts})
    return (
        f"{counted(len(requests) * width, 'request')}, {width} a token and layer, "
        f"{counted(len(requests) // layers, 'token')}, {counted(layers, 'layer')}, "
        f"{counted(distinct, 'different expert')}"
    )


def _table(replays: Sequence[Replay]) -> Table:
    table = Table("cache", "slots", title="hits in % of the requests, and GB of experts read a token")
    for title in TITLES.values():
        table.add_column(f"{title} %", justify="right")
    for title in TITLES.values():
        table.add_column(f"{title} GB", justify="right")
    for replay in replays:
        rates = [f"{100 * replay.hit_rate(name):.1f}" for name in TITLES]
        read = [f"{replay.bytes_per_token(name) / 1e9:.2f}" for name in TITLES]
        table.add_row(f"{replay.capacity_bytes / 1e9:g} GB", f"{replay.slots:,}", *rates, *read)
    return table


def _document(trace: Path, order: str, requests: Sequence[ExpertRequest], replays: Sequence[Replay]) -> dict[str, Any]:
    return {
        "trace": str(trace),
        "order": order,
        "requests": replays[0].requests,
        "tokens": replays[0].tokens,
        "layers": len({request.layer for request in requests}),
        "experts_per_token": max(len(request.experts) for request in requests),
        "expert_bytes": replays[0].expert_bytes,
        "capacities": [
            {
                "capacity_bytes": replay.capacity_bytes,
                "slots": replay.slots,
                "hits": dict(replay.hits),
                "hit_rate": {name: replay.hit_rate(name) for name in TITLES},
                "bytes_per_token": {name: replay.bytes_per_token(name) for name in TITLES},
            }
            for replay in replays
        ],
    }


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise SimulationFailure(
            "--plot needs matplotlib, which is not installed: pip install 'k3ray[plot]', or leave --plot out"
        ) from None


def _draw(replays: Sequence[Replay], order: str) -> bytes:
    """Return a PNG: hits against capacity."""
    figure = _figure_class()(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    gigabytes = [replay.capacity_bytes / 1e9 for replay in replays]
    for name, style in zip(TITLES, ("o--", "o-", "o:"), strict=True):
        rates = [100 * replay.hit_rate(name) for replay in replays]
        axes.plot(gigabytes, rates, style, label=TITLES[name], markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(gigabytes, [f"{size:g}" for size in gigabytes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("expert cache, GB")
    axes.set_ylabel("requests that hit, %")
    axes.set_title(f"Expert cache on the trace, {order} order")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    return image.getvalue()
