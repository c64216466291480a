"""The vocabulary's two files: that they read, that they fit the model, and the hash of the ranks, to be compared."""

from __future__ import annotations

import hashlib

from k3ray.download.known_files import Known
from k3ray.download.selection import TOKENIZER
from k3ray.download.verdict import Finding, Problem, finding, unchecked
from k3ray.download.workplace import Workplace
from k3ray.vocabulary import TokenizerError, read_vocabulary

CHECK = "vocabulary"


def prove_vocabulary(workplace: Workplace, known: Known) -> Finding:
    """One finding; a wrong file is named by what refuses it, both when it cannot be told which is wrong."""
    missing = [name for name in TOKENIZER if not workplace.final(name).is_file()]
    if len(missing) == len(TOKENIZER) and not known.released and not set(TOKENIZER) & set(known.files):
        return unchecked(CHECK, f"no {TOKENIZER[0]} here: text needs one, ids do not")
    if missing:
        return finding(CHECK, "its files", [Problem(name, "is missing") for name in missing])
    try:
        vocabulary = read_vocabulary(workplace.directory, known.config.vocab_size if known.config else None)
    except TokenizerError as error:
        where = str(error)
        named = [name for name in TOKENIZER if where.startswith(str(workplace.final(name)))] or list(TOKENIZER)
        return finding(CHECK, "its files", [Problem(name, where) for name in named])
    digest = hashlib.sha256(workplace.final(TOKENIZER[0]).read_bytes()).hexdigest()
    detail = f"{len(vocabulary.ranks):,} ranks, {len(vocabulary.added):,} added tokens, sha256 {digest}"
    compared = "" if TOKENIZER[0] in known.files else " (nothing here says what it should be)"
    return finding(CHECK, detail + compared)
