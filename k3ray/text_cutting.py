"""How text is cut before the byte-pair encoding: the split pattern, the length rule, and what is not valid Unicode.

The rules are the released tokenizer's. This file knows no vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# The eight alternatives of the released tokenizer, in the syntax of tiktoken's regular expressions.
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

MAX_PIECE = 400_000
"""Code points of one piece handed to the regular expression."""
MAX_RUN = 25_000
"""Code points of one class, all `str.isspace()` or none of it, that may stand together in a piece."""

# For str patterns \s is exactly str.isspace (a test goes through every code point).
_RUNS = re.compile(r"\s+|\S+")
# What the "surrogateescape" decoder makes of bytes that are not UTF-8: byte b becomes U+DC00 + b.
_ESCAPED = re.compile("([\udc80-\udcff]+)")


def cut_text(text: str, max_piece: int = MAX_PIECE, max_run: int = MAX_RUN) -> Iterator[str]:
    """Cut text into pieces that bound the regular expression's work on hostile input; joined they are the text.

    First every `max_piece` code points; then, within such a piece, before the character that would make a run of one
    isspace class longer than `max_run`. Empty text has no pieces.
    """
    for low in range(0, len(text), max_piece):
        piece = text[low : low + max_piece]
        start = 0
        if len(piece) > max_run:
            for run in _RUNS.finditer(piece):
                for cut in range(run.start() + max_run, run.end(), max_run):
                    yield piece[start:cut]
                    start = cut
        yield piece[start:]


def repair_surrogates(text: str) -> str:
    """Join surrogate pairs to their character and put U+FFFD for every lone surrogate, as tiktoken does.

    A Python string may hold surrogates (a JSON escape like \\ud800, an argument that was not UTF-8) but has no UTF-8
    form then. A caller that wants such bytes kept passes bytes instead.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def split_valid_utf8(data: bytes) -> Iterator[str | bytes]:
    """Cut bytes into stretches that are valid UTF-8 (given as str) and stretches that are not (given as bytes).

    Joined, with the str encoded again, they are the data. No stretch is empty.
    """
    for index, stretch in enumerate(_ESCAPED.split(data.decode("utf-8", "surrogateescape"))):
        if stretch:
            yield stretch.encode("utf-8", "surrogateescape") if index % 2 else stretch
