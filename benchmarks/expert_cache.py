"""How good the expert cache's policy is: `python -m benchmarks.expert_cache TRACE [SECTION ...]` from the root.

Sections: rivals, sensitivity, prompts, synthetic, embedded. Prints the tables of docs/experiments/expert-cache.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.expert_cache_rivals import RIVALS, Rival
from benchmarks.synthetic_routers import LAYERS, ROUTERS, TOP_K, requests_of
from k3ray.embedded_model import embedded_model_dir
from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.cache.policy import LruPolicy
from k3ray.workers.cache.reuse import ReuseMemory
from k3ray.workers.cache.simulate import optimum_hits, replay
from k3ray.workers.cache.trace import ExpertRequest, Pass, decoding_order, read_trace, recorded_order

EXPERT_BYTES = 17_547_264
DECODING_GB = (4, 8, 13, 16, 24, 26, 32, 64, 128)
RECORDED_GB = (8, 32, 64, 128)
SHARES = (0.15, 0.3, 0.6, 0.9, 1.2, 2.0, 4.0, 8.0)  # of one token's experts


def circle(memory: ReuseMemory | None = None) -> Rival:
    """The policy with other constants."""
    return lambda requests, slots: replay(requests, CirclePolicy(slots, memory))


def lru(requests: Sequence[ExpertRequest], slots: int) -> int:
    """Least recently used."""
    return replay(requests, LruPolicy(slots))


BOTH: dict[str, Rival] = {"optimum": optimum_hits, "LRU": lru, "circle": circle()}


def row(name: str, policy: Rival, requests: Sequence[ExpertRequest], slots: Sequence[int]) -> str:
    """A line of a table: hits in per cent."""
    total = sum(len(request.experts) for request in requests)
    rates = " | ".join(f"{100 * policy(requests, size) / total:.2f}" for size in slots)
    return f"| {name} | {rates} |"


def table(title: str, heads: Sequence[object], rows: Sequence[str]) -> None:
    """Print a table."""
    print(f"\n{title}\n\n| | {' | '.join(map(str, heads))} |\n|---|{'---:|' * len(heads)}")
    print("\n".join(rows), flush=True)


def in_slots(gigabytes: Sequence[int]) -> list[int]:
    """Whole experts of the released model."""
    return [size * 10**9 // EXPERT_BYTES for size in gigabytes]


def rivals(passes: Sequence[Pass]) -> None:
    """The recorded trace, in both orders."""
    for title, requests, sizes in (
        ("decoding order, GB", decoding_order(passes), DECODING_GB),
        ("recorded order, GB", recorded_order(passes), RECORDED_GB),
    ):
        policies = BOTH | RIVALS
        table(title, sizes, [row(name, policy, requests, in_slots(sizes)) for name, policy in policies.items()])


def sensitivity(passes: Sequence[Pass]) -> None:
    """One constant changed at a time."""
    base = ReuseMemory()
    changed: dict[str, ReuseMemory] = {"as it is": base}
    for short in (0.0001, 0.1, 0.3, 0.4):
        changed[f"short pace {short:g}"] = replace(base, paces=(short, *base.paces[1:]))
    for middle in (0.6, 0.8, 0.95):
        changed[f"middle pace {middle}"] = replace(base, paces=(base.paces[0], middle, base.paces[2]))
    for long in (0.95, 0.99, 0.995):
        changed[f"long pace {long}"] = replace(base, paces=(*base.paces[:2], long))
    for weight in (0.0, 0.5, 0.75, 1.0):
        changed[f"last weight {weight}"] = replace(base, last_weight=weight)
    for lead in (1.0, 1.5, 3.0):
        changed[f"lead {lead}"] = replace(base, lead=lead)
    for window in (5, 10, 40, 80):
        changed[f"window {window}"] = replace(base, window=window)
    for view in range(1, len(base.views)):
        changed[f"without view {base.views[view]}"] = replace(base, views=base.views[:view] + base.views[view + 1 :])
    sizes = DECODING_GB
    decoding = decoding_order(passes)
    table("decoding order, GB", sizes, [row(name, circle(m), decoding, in_slots(sizes)) for name, m in changed.items()])
    kinds = ("zipf", "drift, slow", "topics", "sticky, zipf")
    heads = [f"{kind}: {share}" for kind in kinds for share in (0.3, 2.0)]
    streams = [requests_of(kind) for kind in kinds]
    rows = []
    for name, memory in changed.items():
        cells = [row("", circle(memory), one, [int(s * TOP_K * LAYERS) for s in (0.3, 2.0)])[5:-2] for one in streams]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    table("synthetic routers", heads, rows)


def prompts(passes: Sequence[Pass]) -> None:
    """A prompt of the last pass's first tokens in one chunk, each expert once, then the others decoded."""
    chosen = passes[-1].chosen
    for count in (2, 5, 8):
        orders: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {
            "first token first": lambda rows: rows,
            "last token first": lambda rows: rows[::-1],
        }
        for name, order in orders.items():
            requests = []
            for layer, rows in chosen:
                every = [expert for one in order(rows[:count].tolist()) for expert in one]
                requests.append(ExpertRequest(layer, tuple(dict.fromkeys(every))))
            for token in range(count, passes[-1].num_tokens):
                requests += [ExpertRequest(layer, tuple(rows[token].tolist())) for layer, rows in chosen]
            slots = in_slots(DECODING_GB[:7])
            lines = [row(policy, hits, requests, slots) for policy, hits in BOTH.items()]
            table(f"prompt of {count}, union with the {name}, GB", DECODING_GB[:7], lines)


def synthetic() -> None:
    """Every synthetic router at shares of one token's experts."""
    for kind in ROUTERS:
        requests = requests_of(kind)
        slots = [int(share * TOP_K * LAYERS) for share in SHARES]
        table(f"{kind}, share of a token's experts", SHARES, [row(n, p, requests, slots) for n, p in BOTH.items()])


def embedded() -> None:
    """What the embedded model chooses while it generates 100 tokens after a prompt of ten."""
    requests = embedded_requests(10, 100)
    layers = len({request.layer for request in requests})
    width = len(requests[0].experts)
    slots = [max(int(share * width * layers), width) for share in SHARES]
    table(
        "the embedded model, share of a token's experts", SHARES, [row(n, p, requests, slots) for n, p in BOTH.items()]
    )


def embedded_requests(prompt: int, gen: int) -> list[ExpertRequest]:
    """Run the embedded model token by token and record its routers."""
    from k3ray.workers.frames import ActivationFrame
    from k3ray.workers.loading import CheckpointSpec, StageSpec, load_slice
    from k3ray.workers.model.config import read_config

    folder = embedded_model_dir()
    layers = read_config(folder).num_hidden_layers
    model = load_slice(StageSpec(CheckpointSpec(folder, None, layers), 0, layers, 1, ()), []).layers
    model.open_sequence(0, prompt + gen)
    requests: list[ExpertRequest] = []

    def observe(name: str, layer: int, values: object) -> None:
        if name == "router_ids":
            requests.extend(ExpertRequest(layer, tuple(ids)) for ids in np.asarray(values).tolist())

    token = 84
    for position in range(prompt + gen):
        one = np.ones(1, np.int64)
        frame = ActivationFrame(
            position + 1, 0 * one, position * one, np.array([token], np.int32), one.astype(np.bool_),
            np.zeros((1, 0), np.float32), np.zeros((1, 0, 0), np.float32),
        )  # fmt: skip
        logits = model.logits(model.forward(frame, observe))
        token = (token * 37 + 11) % 1000 if position < prompt else int(np.argmax(logits[0]))
    return requests


def main(arguments: Sequence[str]) -> None:
    """Print the sections named, or all."""
    passes = read_trace(Path(arguments[0]))
    sections: dict[str, Callable[[], None]] = {
        "rivals": lambda: rivals(passes),
        "sensitivity": lambda: sensitivity(passes),
        "prompts": lambda: prompts(passes),
        "synthetic": synthetic,
        "embedded": embedded,
    }
    for name in arguments[1:] or sections:
        sections[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
