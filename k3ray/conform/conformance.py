"""The conformance run: each layer, and a whole prompt, through our slice and through the reference, and what differs.

One layer is in memory at a time, and everything that needs it is run while it is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from k3ray.conform.comparison import (
    Comparison,
    ExpertChoice,
    aligned,
    compare,
    compare_all,
    cut,
    judge_choice,
    settle_ties,
)
from k3ray.conform.inputs import Inputs, LayerInputs, RecordedPrompt
from k3ray.conform.own_side import STAGES, STATES, OwnLayer, OwnModel, OwnRun
from k3ray.conform.reference import Floats, Ids, Reference, ReferenceRun
from k3ray.workers.failure import Failure

Float32Array = npt.NDArray[np.float32]


class ReferenceBroke(Failure):
    """The reference itself failed: nothing was compared."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Largest relative errors that pass, and what counts as a near tie between experts.

    layer: one layer against the reference. whole: logits after all layers. recorded: against what others recorded in
    float32. tie_margin, whole_tie_margin: difference of two selection scores.
    """

    layer: float
    whole: float
    recorded: float
    tie_margin: float
    whole_tie_margin: float


# docs/conform.md says how these were chosen and what was measured
TOLERANCES = {
    "float64": Tolerances(layer=3e-6, whole=5e-4, recorded=2e-4, tie_margin=2e-6, whole_tie_margin=1e-4),
    "float32": Tolerances(layer=2e-5, whole=5e-4, recorded=2e-4, tie_margin=2e-5, whole_tie_margin=1e-4),
}


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer, or the logits of one prompt: what was compared. problem: why nothing could be, or empty."""

    name: str
    kind: str
    source: str
    tokens: int
    pieces: tuple[int, ...]
    comparisons: tuple[Comparison, ...]
    experts: ExpertChoice | None
    experts_read: int
    seconds: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether every array is within its tolerance and no expert was chosen against a clear preference."""
        return not (self.problem or not self.comparisons or self.failures or (self.experts and self.experts.wrong))

    @property
    def failures(self) -> list[Comparison]:
        """The arrays beyond their tolerance, in the order in which they are computed."""
        return [comparison for comparison in self.comparisons if not comparison.passed]

    @property
    def worst(self) -> Comparison | None:
        """The first array beyond its tolerance, or the one that comes closest to it."""
        if failures := self.failures:
            return failures[0]
        return max(self.comparisons, key=lambda found: found.used, default=None)


@dataclass(slots=True)
class WholePrompt:
    """A prompt on its way through the layers, ours and the reference's, each from its own last output."""

    prompt: RecordedPrompt
    own: tuple[Float32Array, Float32Array]
    theirs: tuple[Floats, Floats]
    near_ties: int = 0
    wrong: int = 0


class Conformance:
    """The comparison of one checkpoint. entered: (prefix, blocks) of the first prompt by layer, when it is kept."""

    def __init__(self, own: OwnModel, reference: Reference, tolerances: Tolerances, keep_entered: bool = False) -> None:
        self._own = own
        self._reference = reference
        self._tolerances = tolerances
        self._keep_entered = keep_entered
        self.entered: dict[int, tuple[Float32Array, Float32Array]] = {}

    def run(self, layers: Sequence[int], inputs: Inputs, prompts: Sequence[RecordedPrompt]) -> Iterator[LayerReport]:
        """Yield a report a layer (zero-based) on its inputs, then one a prompt: prompts need all layers, in order."""
        travelling = [self._begin(prompt) for prompt in prompts]
        stopped = ""
        for layer in layers:
            began = time.perf_counter()
            try:
                with self._own.layer(layer) as loaded:
                    report = self._layer(layer, loaded, inputs(layer))
                    for whole in travelling:
                        self._advance(layer, loaded, whole)
                    report = replace(report, experts_read=loaded.experts_read)
            except Failure as failure:
                if failure.exit_code == 2 or isinstance(failure, ReferenceBroke):
                    raise
                report = self._report(layer, None, problem=str(failure))
                stopped = stopped or f"not compared: layer {layer} failed, and it does not go on without it"
                travelling = []
            yield replace(report, seconds=time.perf_counter() - began)
        for whole in travelling:
            yield self._logits(whole)
        for prompt in prompts if stopped else ():
            yield replace(self._report(None, None, problem=stopped), name=f"prompt {prompt.name}", kind="whole model")

    def _layer(self, layer: int, loaded: OwnLayer, fed: LayerInputs) -> LayerReport:
        pieces = cut(len(fed.prefix))
        ours = loaded.run(fed.prefix, fed.blocks, pieces)
        theirs = self._ask(layer, fed.prefix, fed.blocks, ours, self._tolerances.tie_margin)
        comparisons = [*self._compare(ours, theirs), *self._compare_recorded(ours, fed)]
        experts = None
        if ours.expert_ids is not None and theirs.selection is not None:
            experts = judge_choice(ours.expert_ids, theirs.selection, self._tolerances.tie_margin)
        return replace(self._report(layer, fed), pieces=pieces, comparisons=tuple(comparisons), experts=experts)

    def _compare(self, ours: OwnRun, theirs: ReferenceRun) -> Iterator[Comparison]:
        width = self._own.config.kv_lora_rank
        found, expected = dict(ours.stages), dict(theirs.stages)
        if ours.expert_ids is not None and theirs.expert_ids is not None:
            found["router_weights"] = aligned(found["router_weights"], ours.expert_ids)
            expected["router_weights"] = aligned(expected["router_weights"], theirs.expert_ids)
        yield from compare_all(STAGES, found, expected, self._tolerances.layer)
        yield compare("blocks", ours.blocks, theirs.blocks, 0.0)  # handed on, not computed: equal in every bit
        state = dict(theirs.state)
        if (cache := state.pop("cache", None)) is not None:
            state |= {"cache_latent": cache[:, :width], "cache_shared": cache[:, width:]}
        yield from compare_all(STATES, ours.state, state, self._tolerances.layer)

    def _compare_recorded(self, ours: OwnRun, fed: LayerInputs) -> Iterator[Comparison]:
        for names, found, expected in ((STAGES, ours.stages, fed.stages), (STATES, ours.state, fed.state)):
            for name in names:
                if name in expected:
                    values = found.get(name, np.empty((0, 0), np.float32))
                    yield compare(name, values, expected[name], self._tolerances.recorded, "recorded")
        if fed.expert_ids is not None and ours.expert_ids is not None:
            chosen, recorded = (np.sort(ids, axis=1) for ids in (ours.expert_ids, fed.expert_ids))
            yield compare("expert ids", chosen.astype(np.float64), recorded.astype(np.float64), 0.0, "recorded")

    def _begin(self, prompt: RecordedPrompt) -> WholePrompt:
        own = self._own.embed(prompt.ids)
        with _of_reference("the embedding"):
            theirs = self._reference.embed(prompt.ids)
        return WholePrompt(prompt, (own, own[:, None][:, :0]), (theirs, theirs[:, None][:, :0]))

    def _advance(self, layer: int, loaded: OwnLayer, whole: WholePrompt) -> None:
        if self._keep_entered:
            self.entered.setdefault(layer, whole.own)
        ours = loaded.run(*whole.own, cut(len(whole.prompt.ids)))
        margin = self._tolerances.whole_tie_margin
        theirs = self._ask(layer, *whole.theirs, ours, margin)
        if ours.expert_ids is not None and theirs.selection is not None:
            choice = judge_choice(ours.expert_ids, theirs.selection, margin)
            whole.near_ties += len(choice.near_ties)
            whole.wrong += len(choice.wrong)
        whole.own, whole.theirs = (ours.prefix, ours.blocks), (theirs.prefix, theirs.blocks)

    def _logits(self, whole: WholePrompt) -> LayerReport:
        began = time.perf_counter()
        prompt, tolerances = whole.prompt, self._tolerances
        named = replace(self._report(None, None), name=f"prompt {prompt.name}", kind="whole model")
        try:
            ours = self._own.logits(*whole.own)
        except Failure as failure:
            return replace(named, problem=str(failure))
        with _of_reference("the head"):
            theirs = self._reference.logits(*whole.theirs)
        comparisons = [compare("logits", ours, theirs, tolerances.whole), _greedy("greedy ids", ours, theirs)]
        if prompt.logits.size:
            comparisons += [
                compare("logits", ours, prompt.logits, tolerances.recorded, "recorded"),
                _greedy("greedy ids", ours, prompt.logits, "recorded"),
                compare("logits", theirs, prompt.logits, tolerances.recorded, "reference to recorded"),
            ]
        chosen = f"{whole.near_ties} near ties, {whole.wrong} other experts" if whole.near_ties or whole.wrong else ""
        return replace(
            named, problem=chosen if whole.wrong else "", source=chosen or "every layer from its own last",
            tokens=len(prompt.ids), pieces=cut(len(prompt.ids)), comparisons=tuple(comparisons),
            seconds=time.perf_counter() - began,
        )  # fmt: skip

    def _ask(self, layer: int, prefix: Floats, blocks: Floats, ours: OwnRun, tie_margin: float) -> ReferenceRun:
        """Run the reference; where its scores nearly tie it takes our experts, so that all else can be compared."""

        def choose(selection: Floats, ids: Ids) -> Ids:
            if ours.expert_ids is None:
                return ids
            return settle_ties(ours.expert_ids.astype(np.int64), selection, ids, tie_margin)

        with _of_reference(f"layer {layer}"):
            return self._reference.run_layer(layer, prefix, blocks, choose)

    def _report(self, layer: int | None, fed: LayerInputs | None, problem: str = "") -> LayerReport:
        name, kind = ("", "") if layer is None else (f"layer {layer}", self._own.describe_layer(layer))
        source, tokens = ("", 0) if fed is None else (fed.source, len(fed.prefix))
        return LayerReport(name, kind, source, tokens, (), (), None, 0, 0.0, problem)


@contextmanager
def _of_reference(what: str) -> Iterator[None]:
    """Whatever the reference raises, it is no traceback and no verdict on our side."""
    try:
        yield
    except Exception as error:
        raise ReferenceBroke(f"{what}: the reference failed and nothing was compared: {error!r}") from error


def _greedy(name: str, found: Floats, expected: Floats, against: str = "reference") -> Comparison:
    """Compare the largest logit of each row, unless the expected one leads by less than float32 can tell."""
    if found.shape != expected.shape:
        return compare(name, found, expected, 0.0, against)
    best, other = expected.argmax(axis=1), found.argmax(axis=1)
    rows = np.arange(len(expected))
    lost = np.abs(expected[rows, best] - expected[rows, other]).astype(np.float64)
    row = int(lost.argmax())
    scale = float(np.abs(expected[row]).max()) or 1.0
    return Comparison(name, against, float(lost[row]), float(lost[row]) / scale, row, int(other[row]), 1e-5)
