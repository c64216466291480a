"""What a user may give as a prompt: text, a file's bytes, or ids; checked before any work starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from k3ray.tokenizer import Tokenizer
from k3ray.whole_number import whole_number
from k3ray.workers.failure import Failure

MAX_PROMPT = 32_768
MAX_PROMPT_BYTES = 16 << 20  # tokens are a few bytes long, the longest hundreds
MAX_GEN = 4_096
_IDS = re.compile(r"[0-9]{1,20}")


class PromptFailure(Failure):
    """A prompt, or a number of tokens, that cannot be run."""

    exit_code = 2


def parse_ids(text: str) -> list[int]:
    """Return the ids of "3,5,7"; blanks around an id are allowed, nothing else is, nor an id of more than 20 digits."""
    pieces = [piece.strip() for piece in text.split(",")]
    for place, piece in enumerate(pieces, start=1):
        if not _IDS.fullmatch(piece):
            found = piece if len(piece) <= 40 else f"{piece[:36]}..."
            raise PromptFailure(f"--ids: item {place} is {found!r}, expected whole numbers like 3,5,7")
    return [int(piece) for piece in pieces]


def read_prompt_file(path: Path) -> bytes:
    """Return the file's bytes as they are; PromptFailure when it cannot be read or is longer than any prompt."""
    try:
        with path.open("rb") as file:
            contents = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise PromptFailure(f"--prompt-file {path}: {error.strerror}; name a file that can be read") from None
    if len(contents) > MAX_PROMPT_BYTES:
        raise PromptFailure(
            f"--prompt-file {path}: found more than {MAX_PROMPT_BYTES} bytes, expected at most {MAX_PROMPT} tokens of "
            "text; shorten it"
        )
    return contents


def choose_prompt(
    prompt: str | bytes | None,
    prompt_file: Path | str | None,
    ids: Sequence[int] | None,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    optional: bool = False,
) -> list[int]:
    """Return the ids of exactly one of prompt, prompt_file and ids; optional: none of them is no ids."""
    options = {"--prompt": prompt, "--prompt-file": prompt_file, "--ids": ids}
    given = " and ".join(name for name, value in options.items() if value is not None)
    if optional and not given:
        return []
    if given not in options:
        raise PromptFailure(f"exactly one of {', '.join(options)} is needed, found {given or 'none'}")
    if ids is not None:
        if isinstance(ids, str | bytes | bytearray):
            raise PromptFailure(f"ids: found {type(ids).__name__}, expected a sequence of whole numbers")
        found = [whole_number(f"ids: item {place}", token_id) for place, token_id in enumerate(ids, start=1)]
    elif prompt_file is not None:
        found = require_tokenizer(tokenizer).encode(read_prompt_file(Path(prompt_file)))
    else:
        found = require_tokenizer(tokenizer).encode(prompt or "")
    check_prompt(found, vocab_size)
    return found


def check_prompt(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse an empty or too long prompt and ids outside the model's vocabulary; nothing is cut or wrapped."""
    if not ids:
        raise PromptFailure("the prompt is empty: give at least one token of text or one id")
    if len(ids) > MAX_PROMPT:
        raise PromptFailure(f"the prompt has {len(ids)} tokens, expected at most {MAX_PROMPT}; shorten it")
    for place, token_id in enumerate(ids, start=1):
        if not 0 <= token_id < vocab_size:
            raise PromptFailure(
                f"--ids: item {place} is {token_id}, expected 0 to {vocab_size - 1}, the model's vocabulary"
            )


def check_gen(gen: int) -> None:
    """Refuse a number of tokens to generate that is not whole or outside 1..MAX_GEN."""
    if not 1 <= whole_number("--gen", gen) <= MAX_GEN:
        raise PromptFailure(f"--gen: found {gen}, expected 1 to {MAX_GEN}")


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer, or refuse text when there is no vocabulary."""
    if tokenizer is None:
        raise PromptFailure(
            "a text prompt needs a vocabulary: this model's folder has no tiktoken.model. Name one with --tok or "
            "K3_TOK_FILES, or give token ids with --ids"
        )
    return tokenizer
