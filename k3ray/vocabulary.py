"""Reading a vocabulary: `tiktoken.model` (the ranks) and `tokenizer_config.json` (the added tokens), with every check.

The files are read directly: tiktoken's own loader caches by path, so that a changed file would read as the old one.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.failure import Failure

MAX_FILE_BYTES = 256 << 20
"""The released tiktoken.model has 2.8 MB; what is larger than this is some other file."""
MAX_ADDED = 65_536
"""The release has 256 added ids; a model with more than this many ids past the ranks has another model's files."""


class TokenizerError(Failure):
    """A vocabulary that cannot be used, or ids that it does not have."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token appended after the ranks; `special` is what its entry in tokenizer_config.json says."""

    content: str
    special: bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything the two files say: the ranks 0..n-1 by token bytes, and the added token of every id from n on."""

    ranks: dict[bytes, int]
    added: dict[int, AddedToken]


def read_vocabulary(path: Path, vocab_size: int | None = None) -> Vocabulary:
    """Read the vocabulary of a model directory (or of the path of its tiktoken.model).

    Every id from the number of ranks to `vocab_size` (without it: to the largest id that tokenizer_config.json names)
    gets an added token; those not named in the file are `<|reserved_token_{id}|>`. Raises TokenizerError.
    """
    ranks_path = path / "tiktoken.model" if path.is_dir() else path
    ranks = _parse_ranks(ranks_path, _read_file(ranks_path))
    config_path = ranks_path.with_name("tokenizer_config.json")
    named = _parse_added(config_path, _read_file(config_path), len(ranks))
    end = max(named, default=len(ranks) - 1) + 1
    if vocab_size is not None:
        if end > vocab_size:
            raise TokenizerError(
                f"{ranks_path.parent}: the tokenizer has ids up to {end - 1} ({len(ranks)} ranks and the added tokens) "
                f"and the model's vocab_size is {vocab_size}: these files belong to different models"
            )
        end = vocab_size
    if end - len(ranks) > MAX_ADDED:
        raise TokenizerError(
            f"{ranks_path}: {len(ranks)} ranks leave {end - len(ranks)} of {end} ids to added tokens, expected at most "
            f"{MAX_ADDED}: is the file complete, and the model's own?"
        )
    return Vocabulary(ranks, _fill_reserved(config_path, named, len(ranks), end))


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TokenizerError(
            f"{path}: cannot be read ({error.strerror}); "
            f"a model directory holds tiktoken.model and tokenizer_config.json"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise TokenizerError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so not a tokenizer's file")
    return data


def _parse_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """The ranks of a tiktoken.model: lines of base64 token, space, decimal rank, in any order."""
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}  # rank -> line number
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        token, rank = _parse_rank_line(f"{path}:{number}", line)
        if rank in lines:
            raise TokenizerError(f"{path}:{number}: rank {rank} is already taken by line {lines[rank]}")
        if token in ranks:
            raise TokenizerError(f"{path}:{number}: token {token!r} has rank {rank} here and {ranks[token]} before")
        ranks[token] = rank
        lines[rank] = number
    if not ranks:
        raise TokenizerError(f"{path}: empty, expected lines of a base64 token, a space and its rank")
    largest = max(lines)
    if largest != len(lines) - 1:
        gap = next(rank for rank in range(len(lines)) if rank not in lines)
        raise TokenizerError(f"{path}: {len(lines)} ranks reach {largest} and rank {gap} is missing: not dense")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{path}: {len(missing)} of the 256 single bytes have no rank, the first is {missing[0]:#04x}: "
            f"such a vocabulary cannot encode every text"
        )
    return ranks


def _parse_rank_line(where: str, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit() or len(fields[1]) > 9:
        raise TokenizerError(f"{where}: expected a base64 token, a space and its rank, found {line[:60]!r}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise TokenizerError(f"{where}: {fields[0][:60]!r} is not base64 ({error})") from error
    if not token:
        raise TokenizerError(f"{where}: an empty token")
    return token, int(fields[1])


def _parse_added(path: Path, data: bytes, num_ranks: int) -> dict[int, AddedToken]:
    """The `added_tokens_decoder` of a tokenizer_config.json: id -> token."""

    def unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
        # json keeps the last of repeated keys without a word: an added id given twice would lose a token.
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise TokenizerError(f"{path}: the key {next(k for k in keys if keys.count(k) > 1)!r} is given twice")
        return dict(pairs)

    try:
        config = json.loads(data, object_pairs_hook=unrepeated)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from error
    entries = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise TokenizerError(f"{path}: no object added_tokens_decoder, expected one from id to {{content, special}}")
    added = dict(_parse_added_entry(path, key, entry, num_ranks) for key, entry in entries.items())
    if added and min(added) != num_ranks:
        # Otherwise a tiktoken.model cut at the end of a line would pass, its lost ranks taken for reserved tokens.
        raise TokenizerError(
            f"{path}: the added tokens begin at id {min(added)}, expected {num_ranks}, the number of ranks in "
            f"tiktoken.model: is that file complete? (If id {num_ranks} is an added token, name it in this file.)"
        )
    return added


def _parse_added_entry(path: Path, key: str, entry: object, num_ranks: int) -> tuple[int, AddedToken]:
    where = f"{path}: added_tokens_decoder[{key!r}]"
    # Only the plain form of a number, so that "07" cannot be a second entry for 7.
    if not (key.isascii() and key.isdigit() and len(key) <= 9 and key == str(int(key))):
        raise TokenizerError(f"{where}: expected a token id")
    if int(key) < num_ranks:
        raise TokenizerError(
            f"{where}: lies inside the ranks 0..{num_ranks - 1} of tiktoken.model: "
            f"these files belong to different models"
        )
    content = entry.get("content") if isinstance(entry, dict) else None
    special = entry.get("special", False) if isinstance(entry, dict) else None
    if not isinstance(content, str) or not content or not isinstance(special, bool):
        raise TokenizerError(f"{where}: expected an object with a non-empty string content and a boolean special")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"{where}: content {content!r} holds a lone surrogate") from error
    return int(key), AddedToken(content, special)


def _fill_reserved(path: Path, named: dict[int, AddedToken], num_ranks: int, end: int) -> dict[int, AddedToken]:
    """Every id from num_ranks to end with its token, refusing two ids with one name."""
    added: dict[int, AddedToken] = {}
    owner: dict[str, int] = {}
    for token_id in range(num_ranks, end):
        token = named.get(token_id) or AddedToken(f"<|reserved_token_{token_id}|>", special=False)
        if token.content in owner:
            raise TokenizerError(f"{path}: ids {owner[token.content]} and {token_id} are both named {token.content!r}")
        owner[token.content] = token_id
        added[token_id] = token
    return added
