"""Proves a checkpoint folder: every check in its order, each finding with its files, and what could not be checked.

Asks no network: what the hub says comes in as a listing, or from the note of the download.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from k3ray.amounts import decimal_size
from k3ray.download.checksum_proof import plan_checksums, prove_checksums
from k3ray.download.hub import Listing
from k3ray.download.known_files import Known, read_known
from k3ray.download.reading import Reading
from k3ray.download.selection import CONFIG, TOKENIZER
from k3ray.download.shard_proof import ScaleProof, ShardProof, explain_strays, prove_scales, prove_shard
from k3ray.download.verdict import FAIL, Finding, Problem, Verdict, finding, unchecked
from k3ray.download.vocabulary_proof import prove_vocabulary
from k3ray.download.workplace import Workplace
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.shard_files import SUFFIX, shard_names_in
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure

ONLY_TOKENIZER = "only the tokenizer was asked for"
NAN = "NaN scales"
Look = Callable[[int, int], None]


def verify(
    directory: Path,
    deep: bool,
    listing: Listing | None,
    look: Look,
    scales: bool = True,
    only_tokenizer: bool = False,
) -> Verdict:
    """Prove the folder; raises NoCheckpointFolder only where it cannot be looked at at all.

    look: told (bytes read, bytes to read); scales: whether they are read for NaN, 5.5 % of the released bytes.
    only_tokenizer: leave the shards aside, as where nothing else was downloaded.
    """
    here, no_files = _shards_here(directory)
    workplace = Workplace(directory.resolve())
    known = read_known(workplace.directory, listing)
    reading = Reading(look)
    alone = not here and known.record is not None and known.record.wanted <= set(TOKENIZER)
    if only_tokenizer or alone:
        vocabulary = prove_vocabulary(workplace, known)
        checksums, proven = _checksums(workplace, {}, known, [vocabulary], deep, reading)
        return Verdict(str(directory), (vocabulary, checksums), ONLY_TOKENIZER, frozenset(proven), True)
    foreign = _foreign(here, known)
    own = [name for name in here if name not in foreign]
    shards = reading.threads(lambda name: prove_shard(workplace.final(name), known.index), own)
    sizes = _sizes(here, no_files, foreign, known)
    findings = [*_small_files(known), *sizes, *_contents(workplace, shards, known, sizes[0].status != FAIL)]
    findings.append(_nan_scales(workplace, shards, reading) if scales else unchecked(NAN, "left out: --no-scales"))
    findings.append(prove_vocabulary(workplace, known))
    checksums, proven = _checksums(workplace, here, known, findings, deep, reading)
    repairable = known.record is not None or known.released
    return Verdict(str(directory), (*findings, checksums), known.partial, frozenset(proven), repairable)


def _shards_here(directory: Path) -> tuple[dict[str, int], list[Problem]]:
    """Bytes of each shard in the folder, and those that are no files: a link to nowhere or to itself, a pipe."""
    here, problems = {}, []
    for name in shard_names_in(directory):
        try:
            found = (directory / name).stat()
            if stat.S_ISREG(found.st_mode):
                here[name] = found.st_size
            else:  # opening a pipe would wait for ever
                problems.append(Problem(name, "is no file, but a pipe or a device"))
        except OSError as error:
            problems.append(Problem(name, f"cannot be read ({error.strerror})"))
    return here, problems


def _small_files(known: Known) -> list[Finding]:
    """The config and the index file by themselves."""
    findings = []
    if known.config is not None:
        config = known.config
        which = "the release's" if known.released else "not the release's"
        detail = f"{counted(config.num_hidden_layers, 'layer')}, {counted(config.num_experts, 'expert')}: {which}"
        findings.append(finding("config", detail))
    else:
        findings.append(finding("config", CONFIG, [Problem(CONFIG, known.config_problem or "cannot be read")]))
    if known.index is not None:
        detail = f"{counted(len(known.index.names), 'tensor')} in {counted(len(known.index.shard_names), 'shard')}"
        findings.append(finding("index file", detail))
    elif known.index_problem is not None and known.index_name is not None:
        findings.append(finding("index file", known.index_name, [Problem(known.index_name, known.index_problem)]))
    else:
        missing = [name for name in known.files if name.startswith("model.safetensors.index.json")]
        problems = [Problem(name, "is missing") for name in missing[:1]]
        no_index = "there is none: every .safetensors file is read"
        findings.append(finding("index file", "missing", problems) if problems else unchecked("index file", no_index))
    return findings


def _foreign(here: dict[str, int], known: Known) -> list[str]:
    """The shards in the folder that are none of this checkpoint's, where it is known which are."""
    stated = {*known.expected, *(known.index.shard_names if known.index is not None else ())}
    return [name for name in here if name not in stated] if stated else []


def _sizes(here: dict[str, int], no_files: list[Problem], foreign: list[str], known: Known) -> list[Finding]:
    """How many shards, each one's size, and the total."""
    expected = known.expected or frozenset(here)
    missing = sorted(expected - set(here) - {problem.file for problem in no_files})
    problems = [replace(problem, refetch=problem.file in expected) for problem in no_files]
    problems += [Problem(name, "is missing") for name in missing]
    problems += [Problem(name, "is no shard of this checkpoint: move it away", refetch=False) for name in foreign]
    problems.sort(key=lambda problem: (not problem.refetch, problem.file))
    if not here:
        problems = problems or [Problem(f"*{SUFFIX}", "there is no shard here", refetch=False)]
    detail = f"{len(set(here) & expected)} of {len(expected)}" + (f" ({known.partial})" if known.partial else "")
    count = finding("shard count", detail if known.expected else f"{len(here)}", problems)
    if not known.expected and not problems:
        count = unchecked("shard count", f"{len(here)}: nothing says how many")
    if not known.sizes:
        why = "nothing here says what they should be"
        return [count, unchecked("each size", why), unchecked("total size", f"{sum(here.values()):,} bytes: {why}")]
    wrong = [
        Problem(name, f"found {size:,} bytes, expected {known.sizes[name]:,}")
        for name, size in here.items()
        if name in known.sizes and size != known.sizes[name]
    ]
    compared = [name for name in here if name in known.sizes and name in expected]
    sizes = finding("each size", f"{len(compared)} compared with {known.sizes_from}", wrong)
    if not compared:
        sizes = unchecked("each size", "no shard is here")
    total = sum(here[name] for name in compared)
    due = sum(known.sizes[name] for name in expected if name in known.sizes)
    text = f"{total:,} of {due:,} bytes"
    return [count, sizes, Finding("total size", FAIL if total != due else "pass", text)]


def _contents(workplace: Workplace, shards: list[ShardProof], known: Known, whole: bool) -> list[Finding]:
    """Headers, the index against them, the text model. whole: all shards are here, and no other."""
    tensors = sum(proof.num_tensors for proof in shards)
    detail = f"{counted(len(shards), 'shard')}, {counted(tensors, 'tensor')}"
    headers = finding("headers", detail, [p for proof in shards for p in proof.header])
    if not shards:
        headers = unchecked("headers", "no shard is here")
    if known.index is None:
        index = unchecked("index against headers", "there is no index file that can be read")
    else:
        readable = [proof for proof in shards if not proof.header and proof.name in known.index.shard_names]
        detail = f"{len(readable)} of {counted(len(known.index.shard_names), 'shard')}"
        index = finding("index against headers", detail, explain_strays(readable, known.index))
        if not readable:
            index = unchecked("index against headers", "no header of its shards can be read")
    sound = whole and FAIL not in (headers.status, index.status)
    return [headers, index, _bound(workplace, known, sound)]


def _nan_scales(workplace: Workplace, shards: list[ShardProof], reading: Reading) -> Finding:
    """The scale bytes of every shard whose header can be read."""
    scaled = [proof for proof in shards if proof.scale_bytes]
    unread = sum(bool(proof.header) for proof in shards)
    beside = f"; {counted(unread, 'shard')} could not be read" if unread else ""
    if not scaled:
        return unchecked(NAN, "there is no shard with scales" + beside)
    reading.expect(sum(proof.scale_bytes for proof in scaled))

    def prove(shard: ShardProof) -> ScaleProof:
        return prove_scales(workplace.final(shard.name), reading.read)

    proofs = reading.threads(prove, scaled)
    problems = [problem for proof in proofs for problem in proof.nan]
    free = "" if problems else " without a NaN"
    tensors, read = sum(proof.num_tensors for proof in proofs), sum(proof.num_bytes for proof in proofs)
    return finding(NAN, f"{counted(tensors, 'scale tensor')}{free}, {decimal_size(read)} read{beside}", problems)


def _bound(workplace: Workplace, known: Known, sound: bool) -> Finding:
    """Whether the text model that the config describes is all there, in its shapes."""
    check = "text model"
    if known.config is None:
        return unchecked(check, "there is no config that can be read")
    if known.partial is not None:
        return unchecked(check, f"part of it is here: {known.partial}")
    if not sound:
        return unchecked(check, "the shards are to be put right first")
    try:
        binding = bind(known.config, open_index(workplace.directory))
    except Failure as error:
        return finding(check, "its tensors", [Problem(CONFIG, str(error), refetch=False)])
    return finding(check, f"{counted(binding.num_bound, 'tensor')} bound, {binding.num_left:,} left alone")


def _checksums(
    workplace: Workplace,
    here: dict[str, int],
    known: Known,
    findings: list[Finding],
    deep: bool,
    reading: Reading,
) -> tuple[Finding, list[str]]:
    """The checksums, and the files whose bytes were read and are right."""
    small = [name for name in (CONFIG, *TOKENIZER, known.index_name, "generation_config.json") if name is not None]
    names = {*here, *(name for name in small if workplace.final(name).is_file())}
    suspects = [problem.file for found in findings for problem in found.problems]
    plan = plan_checksums(workplace, names, known.files, known.record, suspects, deep)
    if not plan.to_read and not plan.trusted:
        advice = "the hub's are not here: --deep asks for them" if known.released else "no note of a download is here"
        return unchecked("checksums", f"of {counted(len(plan.unknown), 'file')}: {advice}"), []
    reading.expect(plan.num_bytes)
    problems, proven = prove_checksums(workplace, plan, reading)
    parts = [f"{counted(len(plan.to_read), 'file')} read and compared"]
    if plan.trusted:
        parts.append(f"{len(plan.trusted)} unchanged since they were right (--deep reads them)")
    if plan.unknown:
        parts.append(f"{len(plan.unknown)} NOT compared")
    return finding("checksums", ", ".join(parts), problems), proven
