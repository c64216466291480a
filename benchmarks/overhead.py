"""What many processes cost: a token over 2 stages and 2 expert shards against the same work in one process.

    .venv/bin/python -m benchmarks.overhead [--rounds 5] [--gen 24]

Makes a checkpoint 2048 wide of 1.7 GB (removed at the end) unless one is named. One host, the same number of threads
(all cores unless --threads says otherwise), everything resident. In turn in one run: one process without Ray or
messages, one stage on Ray, stages and shards on Ray, token by token; a ratio is of two neighbouring tokens. The bits
must agree. Ends with 1 when the median ratio is above --limit, or when they do not.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.result_rows import RESULTS, append_records, this_machine
from k3ray.cluster.actor_chain import ActorChain
from k3ray.cluster.machine import default_threads, physical_cores
from k3ray.cluster.plan import Plan, make_plan
from k3ray.cluster.ray_runtime import RayRuntime, RaySettings, ray_runtime
from k3ray.cluster.recovering_chain import RecoveringChain
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.driver import Driver
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.in_process import InProcessChain, start_in_process
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import read_config
from k3ray.workers.step_times import StepTimes

SPEC = SyntheticSpec(
    num_hidden_layers=8,
    hidden_size=2048,
    vocab_size=32_768,
    intermediate_size=8192,
    attn_res_block_size=4,
    kda_num_heads=16,
    kda_head_dim=128,
    num_attention_heads=16,
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=64,
    num_experts_per_token=16,
    routed_expert_hidden_size=1024,
    moe_intermediate_size=1024,
)
PROMPT = [5, 6, 7, 8]
WARM_UP = 4
ALONE = "one process"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Subject:
    """One way to run the model."""

    name: str
    driver: Driver
    chain: RecoveringChain | InProcessChain


@dataclass(frozen=True, slots=True)
class Measured:
    """One generation. steps: seconds of each decoded token. times: of all processes. digest: of all logits' bytes."""

    name: str
    steps: tuple[float, ...]
    times: StepTimes
    digest: str


class Generating:
    """One subject's greedy sequence, a token at a time; the prompt and the first tokens are not in the figures."""

    def __init__(self, subject: Subject, gen: int) -> None:
        self._subject = subject
        self._session = subject.driver.open(len(PROMPT) + gen + WARM_UP)
        self._token = int(np.argmax(subject.driver.forward({self._session: PROMPT})[self._session][0]))
        self._digest = hashlib.sha256()
        self._before = IoCounts()
        self._steps: list[float] = []

    def begin(self) -> None:
        """Count from now on."""
        self._before = self._subject.chain.counts()
        self._steps.clear()

    def step(self) -> None:
        """One token more."""
        started = time.perf_counter()
        logits = self._subject.driver.forward({self._session: [self._token]})[self._session][0]
        self._token = int(np.argmax(logits))
        self._steps.append(time.perf_counter() - started)
        self._digest.update(logits.tobytes())

    def end(self) -> Measured:
        """What it took."""
        times = (self._subject.chain.counts() - self._before).times
        self._subject.driver.close(self._session)
        return Measured(self._subject.name, tuple(self._steps), times, self._digest.hexdigest())


def generate(running: Sequence[Subject], gen: int) -> list[Measured]:
    """Decode with all of them, token by token in turn, so that what else the machine does meets all alike."""
    sequences = [Generating(one, gen) for one in running]
    for step in range(WARM_UP + gen):
        for sequence in sequences:
            if step == WARM_UP:
                sequence.begin()
            sequence.step()
    return [one.end() for one in sequences]


@contextmanager
def subjects(model: Path, threads: int, stages: int, shards: int) -> Iterator[list[Subject]]:
    """All of them loaded, one after the other asked."""
    spec = CheckpointSpec(model, None, read_config(model).num_hidden_layers)
    cores = physical_cores()
    with ExitStack() as ending:
        alone = make_plan(spec, 1, 0, threads, cores)
        chain = start_in_process(alone.stages, alone.shards)
        ending.callback(chain.close)
        found = [Subject(ALONE, Driver(chain), chain)]
        runtime = ending.enter_context(ray_runtime(RaySettings("local", workers=1 + stages + shards)))
        for name, plan in (
            ("one stage", alone),
            (f"{stages} stages, {shards} shards", make_plan(spec, stages, shards, threads, cores)),
        ):
            found.append(ending.enter_context(on_ray(name, plan, runtime)))
        yield found


@contextmanager
def on_ray(name: str, plan: Plan, runtime: RayRuntime) -> Iterator[Subject]:
    """A plan's actors."""
    actors = ActorChain(
        plan, lambda cpus, memory, actor, node: runtime.actor_options(cpus, memory, f"{actor} of {name}", node)
    )
    try:
        actors.load()
        print(f"{name}: threads {[part.threads for part in (*plan.stages, *plan.shards)]}", file=sys.stderr)
        chain = RecoveringChain(actors, RecoverySettings())
        yield Subject(name, Driver(chain), chain)
    finally:
        actors.stop()


def per_token(measured: list[Measured]) -> dict[str, float]:
    """Milliseconds a token by part; see StepTimes.parts."""
    tokens = sum(len(one.steps) for one in measured)
    whole = sum(sum(one.steps) for one in measured)
    parts = sum((one.times for one in measured), StepTimes()).parts(whole)
    return {name: seconds / tokens * 1e3 for name, seconds in parts.items()}


def records_of(runs: list[list[Measured]], threads: int, load: float) -> list[dict[str, object]]:
    """One row a subject."""
    records = []
    for place, first in enumerate(runs[0]):
        mine = [of_round[place] for of_round in runs]
        ratios = [
            median(mine / alone for mine, alone in zip(of_round[place].steps, of_round[0].steps, strict=True))
            for of_round in runs
        ]
        parts = {f"{name}_ms": round(value, 3) for name, value in per_token(mine).items()}
        step = median(step for one in mine for step in one.steps)
        row = {"load": round(load, 2), "threads": threads, "run": first.name, "ms_per_token": round(step * 1e3, 3)}
        ratio = {"ratio": round(median(ratios), 4), "ratio_least": round(min(ratios), 4)}
        records.append({**row, **ratio, "ratio_most": round(max(ratios), 4), **parts})
    return records


def print_table(records: list[dict[str, object]]) -> None:
    """A column a subject."""
    for name in records[0]:
        print(f"{name:26s}" + "".join(f"{record[name]!s:>22s}" for record in records))


@contextmanager
def checkpoint(named: Path | None) -> Iterator[Path]:
    """The one that is named, or one that is made and removed."""
    if named is not None:
        yield named
        return
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    try:
        print(f"writing 1.7 GB to {folder}", file=sys.stderr)
        write_checkpoint(folder / "model", SPEC, seed=0)
        yield folder / "model"
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure in turn, print, append; exit 1 with what did not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; made when none is named")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--threads", type=int, default=default_threads(), help="of all processes together")
    parser.add_argument("--gen", type=int, default=24, help="tokens a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.10, help="of the ratio to one process")
    parser.add_argument("--machine", default=this_machine(), help="name of the results file")
    parser.add_argument("--csv", type=Path, default=None, help="default: benchmarks/results/<machine>-overhead.csv")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with checkpoint(arguments.model) as model:
        shown = subjects(model, arguments.threads, arguments.stages, arguments.shards)
        with shown as running:
            runs = [generate(running, arguments.gen) for _ in range(arguments.rounds)]
    records = records_of(runs, arguments.threads, load)
    print_table(records)
    path = arguments.csv or RESULTS / f"{arguments.machine}-overhead.csv"
    append_records(path, arguments.machine, records)
    digests = {one.digest for of_round in runs for one in of_round}
    if len(digests) > 1:
        sys.exit(f"DID NOT HOLD: {len(digests)} different results")
    ratio = records[-1]["ratio"]
    print(f"added {len(records)} rows to {path}; {records[-1]['run']} take {ratio} times one process")
    if float(str(ratio)) > arguments.limit:
        sys.exit(f"DID NOT HOLD: {ratio} is above {arguments.limit}")


if __name__ == "__main__":
    main()
