"""A small vocabulary in the released format: single bytes, merges trained on a text, made-up merges, added tokens."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from itertools import pairwise

import numpy as np

# Offsets of the release's named added tokens from the first added id; those marked False are not "special".
ADDED_TOKENS: tuple[tuple[int, str, bool], ...] = (
    (0, "[BOS]", True),
    (1, "[EOS]", True),
    (2, "<|end_of_msg|>", True),
    (3, "<|open|>", False),
    (4, "<|close|>", False),
    (5, "<|sep|>", False),
    (6, "[start_header_id]", True),
    (7, "[end_header_id]", True),
    (9, "[EOT]", True),
    (18, "<|media_begin|>", True),
    (19, "<|media_content|>", True),
    (20, "<|media_end|>", True),
    (21, "<|media_pad|>", True),
    (65, "<osagent_mode>", True),
)
MIN_ADDED_SLOTS = 24
"""The named tokens up to <|media_pad|>, then [UNK] and [PAD] in the last two slots."""

# Coarser than the tokenizer's own split (that belongs to the floor above), but it never joins what that separates.
_WORDS = re.compile(r"[\u4e00-\u9fff]+|[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]+| ?[A-Za-z]+")
_MAX_MADE_LENGTH = 12


def make_tokens(text: str, num_ranks: int, seed: int) -> list[bytes]:
    """`num_ranks` tokens by rank: the 256 bytes, merges trained on the text, then letters joined at random by seed."""
    tokens = train_merges(text, num_ranks)
    taken = set(tokens)
    parts = [bytes([letter]) for letter in range(ord("a"), ord("z") + 1)]
    generator = np.random.Generator(np.random.SFC64(seed))
    while len(tokens) < num_ranks:
        # Every made token joins two older ones, so byte-pair encoding can reach it.
        for low, high in generator.integers(0, 2**64 - 1, (4096, 2), np.uint64, endpoint=True).tolist():
            first = b" " if low % 5 == 0 else parts[low % len(parts)]
            made = first + parts[high % min(len(parts), 256)]  # a short second part keeps most within the length
            if len(made) <= _MAX_MADE_LENGTH and made not in taken and len(tokens) < num_ranks:
                taken.add(made)
                tokens.append(made)
                if first != b" ":
                    parts.append(made)
    return tokens


def train_merges(text: str, num_ranks: int) -> list[bytes]:
    """Byte-pair training: the 256 bytes, then at most num_ranks - 256 merges, the most frequent pair first.

    Pairs inside one character go before all others: in a text as small as this one the ranks would otherwise be spent
    on halves of two characters that happen to be neighbours.
    """
    tokens = _single_bytes()
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    counts = Counter(_WORDS.findall(text))
    words = [([rank_of[bytes([byte])] for byte in word.encode()], count) for word, count in sorted(counts.items())]

    def order(pair: tuple[int, int]) -> tuple[bool, int, tuple[int, int]]:
        # A lead byte, or a lead byte with what follows it, and a continuation byte.
        inside_character = tokens[pair[0]][0] >= 0xC0 and 0x80 <= tokens[pair[1]][0] < 0xC0
        return not inside_character, -pairs[pair], pair

    while len(tokens) < num_ranks:
        pairs: Counter[tuple[int, int]] = Counter()
        for ids, count in words:
            for pair in pairwise(ids):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=order)
        merged = tokens[best[0]] + tokens[best[1]]
        if merged not in rank_of:  # the same bytes may come about by another pair
            rank_of[merged] = len(tokens)
            tokens.append(merged)
        words = [(_merge(ids, best, rank_of[merged]), count) for ids, count in words]
    return tokens


def _merge(ids: list[int], pair: tuple[int, int], rank: int) -> list[int]:
    result: list[int] = []
    for token in ids:
        if result and (result[-1], token) == pair:
            result[-1] = rank
        else:
            result.append(token)
    return result


def _single_bytes() -> list[bytes]:
    """The release's order of the single bytes: printable Latin-1 first, then the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [bytes([byte]) for byte in [*printable, *sorted(set(range(256)) - set(printable))]]


def encode_ranks(tokens: list[bytes]) -> bytes:
    """The bytes of a tiktoken.model: base64 token, space, rank, one a line."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def added_tokens(num_ranks: int, added_slots: int) -> dict[int, tuple[str, bool]]:
    """The named added tokens, (name, special) by id, of a vocabulary with these ranks and slots."""
    named = {offset: (name, special) for offset, name, special in ADDED_TOKENS if offset < added_slots - 2}
    named |= {added_slots - 2: ("[UNK]", True), added_slots - 1: ("[PAD]", True)}
    return {num_ranks + offset: token for offset, token in named.items()}


def encode_tokenizer_config(num_ranks: int, added_slots: int) -> str:
    """The text of tokenizer_config.json."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    document = {
        "added_tokens_decoder": {
            str(token_id): {"content": name, **flags, "special": special}
            for token_id, (name, special) in added_tokens(num_ranks, added_slots).items()
        },
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 1_048_576,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    return json.dumps(document, indent=2) + "\n"
