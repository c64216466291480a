"""What others have recorded of the released model, and what nobody has established: figures that are not ours.

Every row says who measured and under which conditions. Nothing here is computed from the audited checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3ray.audit.chosen_tensors import DT_BIAS, ROUTER, ROUTER_BIAS
from k3ray.audit.claims import said
from k3ray.audit.snapshot import Author, Letter, Recorded, Statement, StatisticRow
from k3ray.workers.checkpoint import shapes
from k3ray.workers.model.config import ModelConfig

RELEASE = "moonshotai/Kimi-K3 at 9f62e4e9fffbd0a83ddd60e1c209d828994b3569"
_OTHERS: Author = "recorded by others"
_PREFIX = shapes.RELEASED_PREFIX

# (subject, letter, short name, layer, count, median, p10, p90, minimum, maximum, extra), to the digits recorded
_STATISTICS: tuple[
    tuple[str, Letter, str, int, int, float, float | None, float | None, float, float, dict[str, float]], ...
] = (
    ("KDA A_log", "O", shapes.A_LOG, 1, 96, -0.1533, -0.5367, 0.0743, -0.7531, 2.4661, {}),
    ("KDA dt_bias", "O", DT_BIAS, 1, 12_288, -4.6220, -6.4912, -2.5690, -7.8938, 0.1792, {}),
    ("router correction bias", "O", ROUTER_BIAS, 2, 896, 0.00493, None, None, -0.08442, 0.02861, {}),
    (
        "router row L2 norm", "D", ROUTER, 2, 896, 5.0364, None, None, 2.6019, 7.0232,
        {"Pearson with the correction bias": 0.4567},
    ),
)  # fmt: skip

_C = "kimi-k3-in-c"
_C1 = f"{_C} v1.0.0"
_US = "k3ray's authors"
_LADDER = "2 cores of a virtual Xeon, load 2 to 5; five layers of the released widths, 12.9 GB, streamed from a tape"
_NVME46 = "its authors' machine, NVMe 4.6 GB/s"
_NVME32 = "its authors' machine, 124 cores, NVMe 3.2 GB/s"
_SMALL = "2 cores, AVX2, quiet; a synthetic checkpoint of 1.2 GB: hidden 2048, 8 layers, 64 experts top-8"
_NOISE = "its own noise floor is 33 %"
_TRACE = "a trace of 100,096 requests recorded on the real 93-layer model"

RECORDED = (
    Recorded("the repository", "bytes of the shard files", RELEASE, "1,560,936,091,448", "bytes", "96 shards"),
    Recorded("the repository", "bytes of tensors", RELEASE, "1,560,860,324,864", "bytes", "total_size of its index"),
    Recorded("the repository", "tensor entries", RELEASE, "497,220", "tensors", "118 files in the repository"),
    Recorded("the repository", "vision tensors", RELEASE, "165", "tensors", "MoonViT-V2, 27 layers"),
    Recorded(f"{_C} v0.1", "time per token with 8.24 GB", _NVME32, "32.69", "s/token", _NOISE),
    Recorded(f"{_C} v0.1", "time per token with 127.92 GB", _NVME32, "10.69", "s/token", _NOISE),
    Recorded(_C1, "time per token with 8 GB", _NVME46, "26.5", "s/token", _NOISE),
    Recorded(_C1, "time per token with 32 GB", _NVME46, "24.2", "s/token", _NOISE),
    Recorded(_C1, "time per token with 64 GB", _NVME46, "19.8", "s/token", _NOISE),
    Recorded(_C1, "time per token with 179 GB", _NVME46, "5.59", "s/token", _NOISE),
    Recorded(_C, "smallest memory", "its authors' machine", "8.2", "GB", "a later preset claims 3 GB"),
    Recorded(_C, "expert bytes read for a prompt of 40 tokens", "its authors' machine", "330.73", "GB",
             "with each expert read once a chunk; 648.76 GB without"),
    Recorded(_C1, "indexing 497,220 tensors", "its authors' machine", "0.27", "s", ""),
    Recorded(_C1, "packing the trunk", "its authors' machine", "about 4", "minutes", "108.81 GB"),
    Recorded("the Rust port", "time per token with 8 GiB", "a rented box", "72.47", "s/token",
             "the C engine 74.46 there; logits equal in every byte"),
    Recorded("colibri", "time per token on 64 GB", "its authors' machine", "8.3 falling to 4.9", "s/token",
             "int4 and int8 weights, not the released ones; expert cache of 20 GB"),
    Recorded("colibri", "experts predictable one layer ahead", "its authors' machine", "71.6", "%", ""),
    Recorded("llama.cpp", "tokens per second", "dual Xeon, 1.5 TB of memory, two GPUs", "about 3", "tokens/s",
             "MXFP4 experts, the rest Q8_0"),
    Recorded(_US, f"{_C1}: resident time per token, synthetic model", _SMALL, "0.130 to 0.138", "s/token",
             "4 to 5 times the memory floor of 0.027"),
    Recorded(_US, f"{_C1}: streamed time per token, synthetic model", _SMALL, "0.45 to 0.53", "s/token",
             "at the smallest budget, peak 204 MB"),
    Recorded(_US, f"{_C1}: prompt of 128 ids, synthetic model", _SMALL, "13.0 to 17.2", "s", "2 threads"),
    Recorded(_US, f"{_C1}: bf16 and MXFP4 kernel on one thread", _SMALL, "55 and 5", "%", "of the read bandwidth"),
    Recorded(_US, "a plain actor call of Ray 2.60 with 28 KB", "2 cores, loaded", "1.5 to 2.5", "ms",
             "a hop of a compiled graph 0.3 to 0.8 ms"),
    Recorded(_US, "k3ray: peak memory, all processes, smallest budget", _LADDER, "0.84", "GB", "0.93 GB planned"),
    Recorded(_US, "k3ray: time per token at the smallest budget", _LADDER, "3.68", "s/token",
             "8.86 GB of trunk and 1.12 GB of experts read a token; not comparable with other rows"),
    Recorded("the trace's authors", "distinct experts asked for", _TRACE, "10,010", "experts", "of 82,432"),
    Recorded("the trace's authors", "LRU hits at 8, 32 and 64 GB", _TRACE, "36.2", "%", "Belady: 39.4, 49.0, 61.7"),
    Recorded("the trace's authors", "LRU hits at 128 GB", _TRACE, "49.2", "%", "Belady: 84.6"),
    Recorded("the trace's authors", "LRU hits at 192 GB", _TRACE, "90.0", "%", "Belady: 90.0"),
)  # fmt: skip


def recorded_statistics() -> tuple[StatisticRow, ...]:
    """The released weights' statistics that others have recorded."""
    return tuple(
        StatisticRow(
            f"released weights: layer {layer} {subject}", shapes.layer_name(_PREFIX, layer, short), count, median, p10,
            p90, low, high, dict(extra), letter, _OTHERS, f"{RELEASE}; percentiles as their authors define them",
        )
        for subject, letter, short, layer, count, median, p10, p90, low, high, extra in _STATISTICS
    )  # fmt: skip


def is_released(config: ModelConfig) -> bool:
    """Whether the sizes are the released ones, so that the recorded figures can be compared with."""
    sizes = (config.hidden_size, config.num_hidden_layers, config.num_experts, config.kda_num_heads, config.vocab_size)
    return sizes == (7168, 93, 896, 96, 163_840)


def compare_recorded(config: ModelConfig, rows: Sequence[StatisticRow]) -> list[Statement]:
    """Where the audited weights give the recorded statistics, and where not: an observation, the weights may differ."""
    found = []
    # of one tensor there may be statistics of its values, O, and of what is computed of them, D
    ours = {(row.tensor, row.letter): row for row in rows if row.by == "k3ray"}
    for number, theirs in enumerate(recorded_statistics() if is_released(config) else ()):
        row = ours.get((theirs.tensor, theirs.letter))
        if row is None:
            continue
        pairs = [(row.median, theirs.median), (row.minimum, theirs.minimum), (row.maximum, theirs.maximum)]
        pairs += [(row.extra.get(name), value) for name, value in theirs.extra.items()]
        same = all(one is not None and other is not None and _same(one, other) for one, other in pairs)
        what = "the recorded ones, to their last digit" if same else "not the recorded ones: these are other weights"
        subject = f"median, minimum and maximum of {theirs.subject.removeprefix('released weights: ')}"
        source = f"read here, against {RELEASE}"
        found.append(said(f"recorded.reproduced.{number}", "parameters", theirs.letter, subject, what, source))
    return found


def _same(ours: float, recorded: float) -> bool:
    digits = len(f"{recorded}".partition(".")[2])
    return abs(ours - recorded) <= 0.5000001 * 10.0**-digits if digits else ours == recorded


UNRESOLVED = (
    ("a_log.why", "why A_log is stored with 128 entries for 96 heads",
     "not established: four public loaders keep the first 96, two of them insist that the rest is zero"),
    ("released.logits", "logits of the released weights by the official code",
     "none are known here: goldens come from small random checkpoints in the released layout"),
    ("released.speed", "k3ray's time per token on the released weights",
     "not measured: no machine with all 1.56 TB was at hand; k3ray plan predicts it"),
    ("released.mxfp4", "the released experts' values beyond the rows that were published",
     "64 rows of one expert are published with their decoded values; nothing else was compared"),
    ("router.text", "how the routers load the experts on real text",
     "not established here: the probe is synthetic, the recorded trace holds 12 tokens"),
)  # fmt: skip


# (id, kind, by, subject, found): what readers make of an A_log that is longer than the heads.
_READERS: tuple[tuple[str, Letter, Author, str, str], ...] = (
    (
        "loaders", "O", _OTHERS, "Four public loaders",
        "keep the first 96 of the release's 128 entries and leave the rest",
    ),
    ("strict", "O", _OTHERS, "Two of the four", "also insist that the rest is zero"),
    (
        "k3ray", "D", "k3ray", "k3ray",
        "keeps one entry a head and refuses the checkpoint when an entry beyond them is not zero, or when there are "
        "fewer entries than heads: then the numbers are not one a head, and taking the first would be a guess. It "
        "splits work by heads, never by the stored length",
    ),
)  # fmt: skip


def a_log_readers() -> list[Statement]:
    """What others' loaders do with A_log, as recorded, and what a run of k3ray does."""
    return [
        Statement(
            f"a_log.reader.{id}", "parameters", kind, by, subject, found, "", None,
            "their source code, as recorded" if by == _OTHERS else "the rule by which k3ray binds, docs/checkpoint.md",
        )
        for id, kind, by, subject, found in _READERS
    ]  # fmt: skip


def unresolved_statements() -> list[Statement]:
    """What nobody has established, as far as is known here."""
    return [said(id, "boundary", "U", subject, found, "") for id, subject, found in UNRESOLVED]
