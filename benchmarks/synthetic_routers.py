"""Seeded synthetic routers: the requests of decoding one sequence, for comparing cache policies.

Each is one idea of why an expert would be chosen again: never for a reason (uniform), because it is popular (zipf),
because the topic is still the same (drift slowly, drift fast, topics that change every fifty tokens), because the
previous token had it (sticky, with and without popularity, and with layers that differ), or because the token before
the previous one had it (two conversations that take turns).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from k3ray.workers.cache.trace import ExpertRequest

TOKENS, LAYERS, EXPERTS, TOP_K = 150, 24, 128, 8
Logits = npt.NDArray[np.float64]  # (layers, experts)
Router = Callable[[np.random.Generator, int, list[npt.NDArray[np.intp]]], Logits]
KEPT = 20.0  # a logit that no other reaches


def requests_of(kind: str, seed: int = 1) -> list[ExpertRequest]:
    """Return TOKENS x LAYERS requests of TOP_K experts, best first: logits plus Gumbel noise."""
    random = np.random.default_rng(seed)
    router = ROUTERS[kind](random)
    chosen: list[npt.NDArray[np.intp]] = []
    requests = []
    for token in range(TOKENS):
        scores = router(random, token, chosen)
        chosen.append(np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K])
        requests += [ExpertRequest(layer, tuple(row)) for layer, row in enumerate(chosen[-1].tolist())]
    return requests


def _noise(random: np.random.Generator) -> Logits:
    return random.gumbel(size=(LAYERS, EXPERTS))


def _popularity(random: np.random.Generator) -> Logits:
    """Return Zipf's law with exponent 1, another ranking in every layer."""
    return -np.log1p(np.stack([random.permutation(EXPERTS) for _ in range(LAYERS)]))


def _uniform(random: np.random.Generator) -> Router:
    return lambda random, token, chosen: _noise(random)


def _zipf(random: np.random.Generator) -> Router:
    popularity = _popularity(random)
    return lambda random, token, chosen: popularity + _noise(random)


def _drift(keep: float, conversations: int = 1) -> Callable[[np.random.Generator], Router]:
    def build(random: np.random.Generator) -> Router:
        popularity = _popularity(random)
        topics = [random.standard_normal((LAYERS, EXPERTS)) for _ in range(conversations)]

        def logits(random: np.random.Generator, token: int, chosen: list[npt.NDArray[np.intp]]) -> Logits:
            at = token % conversations
            fresh = random.standard_normal((LAYERS, EXPERTS))
            topics[at] = keep * topics[at] + np.sqrt(1 - keep**2) * fresh
            return 2 * topics[at] + popularity / 2 + 0.3 * _noise(random)

        return logits

    return build


def _topics(random: np.random.Generator) -> Router:
    popularity = _popularity(random)
    topics = random.standard_normal((TOKENS // 50 + 1, LAYERS, EXPERTS))
    return lambda random, token, chosen: 1.5 * topics[token // 50] + popularity / 2 + _noise(random)


def _sticky(popular: float, lowest: float, highest: float) -> Callable[[np.random.Generator], Router]:
    """An expert of the previous token stays with a probability that falls with its rank; lowest, highest: of layers."""

    def build(random: np.random.Generator) -> Router:
        base = popular * _popularity(random)
        falling = np.linspace(1.0, 0.2, TOP_K)
        stay = random.permutation(np.linspace(lowest, highest, LAYERS))[:, None] * falling

        def logits(random: np.random.Generator, token: int, chosen: list[npt.NDArray[np.intp]]) -> Logits:
            scores = base + _noise(random)
            if chosen:
                stays = KEPT * (random.random((LAYERS, TOP_K)) < stay)
                np.put_along_axis(scores, chosen[-1], np.take_along_axis(scores, chosen[-1], 1) + stays, 1)
            return scores

        return logits

    return build


ROUTERS: dict[str, Callable[[np.random.Generator], Router]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "drift, slow": _drift(0.8),
    "drift, fast": _drift(0.5),
    "topics": _topics,
    "sticky": _sticky(0.0, 0.7, 0.7),
    "sticky, zipf": _sticky(1.0, 0.7, 0.7),
    "sticky layers": _sticky(0.0, 0.15, 0.9),
    "two take turns": _drift(0.8, conversations=2),
}
