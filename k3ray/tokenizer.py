"""The tokenizer: text to ids and back, for text from a user and for template text, and decoding of a stream.

It does not know the chat format; ids of markers are asked for by name.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from types import MappingProxyType

import tiktoken

from k3ray.text_cutting import SPLIT_PATTERN, cut_text, repair_surrogates, split_valid_utf8
from k3ray.vocabulary import TokenizerError, Vocabulary, read_vocabulary


class Tokenizer:
    """Encodes and decodes with one vocabulary. Unchanging; may be used from several threads at once."""

    __slots__ = ("_encoding", "_token_bytes", "added_tokens", "num_ranks", "special_ids")

    num_ranks: int
    """Number of byte-pair tokens; the added tokens have the ids from here on."""
    added_tokens: Mapping[str, int]
    """The id of every added token by name, reserved ones included, in the order of the ids."""
    special_ids: frozenset[int]
    """Added tokens that tokenizer_config.json calls special (the chat's open, close and sep markers are not)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {token.content: token_id for token_id, token in vocabulary.added.items()}
        self.num_ranks = len(vocabulary.ranks)
        self.added_tokens = MappingProxyType(names)
        self.special_ids = frozenset(token_id for token_id, token in vocabulary.added.items() if token.special)
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=SPLIT_PATTERN, mergeable_ranks=vocabulary.ranks, special_tokens=names
        )
        by_rank = sorted(vocabulary.ranks, key=vocabulary.ranks.__getitem__)
        self._token_bytes = [*by_rank, *(name.encode() for name in names)]

    @property
    def vocab_size(self) -> int:
        """Number of ids: ranks and added tokens."""
        return len(self._token_bytes)

    def encode(self, text: str | bytes) -> list[int]:
        """Encode text from a user: nothing in it is an added token, whatever it spells.

        Bytes are taken as they are: stretches of valid UTF-8 are encoded as text, and every byte that is part of no
        valid character becomes the token of that single byte. So `decode_bytes(encode(data)) == data` for any data.
        (The model never saw such bytes as text, so there is no reference to follow; single bytes need nothing but
        tiktoken's public interface and cannot merge across the border of a damaged character.)
        A str with surrogates is repaired first (`repair_surrogates`).
        """
        ordinary = self._encoding.encode_ordinary
        stretches = split_valid_utf8(text) if isinstance(text, bytes) else (repair_surrogates(text),)
        ids: list[int] = []
        for stretch in stretches:
            if isinstance(stretch, bytes):
                ids.extend(self._encoding.encode_single_token(bytes([byte])) for byte in stretch)
            else:
                for piece in cut_text(stretch):
                    ids.extend(ordinary(piece))
        return ids

    def encode_template(self, text: str) -> list[int]:
        """Encode text of our own making: every added token's name in it becomes that token."""
        ids: list[int] = []
        for piece in cut_text(repair_surrogates(text)):
            ids.extend(self._encoding.encode(piece, allowed_special="all"))
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the tokens, joined. Raises TokenizerError for an id outside 0..vocab_size-1."""
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens: their bytes joined, then decoded, with U+FFFD for what is not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token (an added token's are its name). Raises TokenizerError for an id outside the range."""
        position = index(token_id)
        if not 0 <= position < len(self._token_bytes):
            raise TokenizerError(f"id {position} is not in the vocabulary, whose ids are 0..{self.vocab_size - 1}")
        return self._token_bytes[position]

    def added_id(self, name: str) -> int:
        """The id of an added token. Raises TokenizerError when the vocabulary has none of that name."""
        if name not in self.added_tokens:
            raise TokenizerError(f"the vocabulary has no added token {name!r}: tokenizer_config.json must name it")
        return self.added_tokens[name]

    def end_ids(self, config_eos: int | Sequence[int]) -> frozenset[int]:
        """The ids at which generation stops: the config's eos, and `[EOS]`, which the model has been seen to emit."""
        ids = {config_eos} if isinstance(config_eos, int) else set(config_eos)
        if "[EOS]" in self.added_tokens:
            ids.add(self.added_tokens["[EOS]"])
        for token_id in ids:
            self.token_bytes(token_id)  # an eos outside the vocabulary could never stop anything
        return frozenset(ids)


class StreamDecoder:
    """Decodes ids as they come, holding back an incomplete UTF-8 character until it is whole or hopeless.

    All that `push` and the final `flush` return, joined, is `Tokenizer.decode` of all ids.
    """

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes: perhaps none. Raises TokenizerError for an id outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What was held back, as U+FFFD, at the end of the stream; the decoder can be used for another one then."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a model directory (or of the path of its tiktoken.model), checked.

    `vocab_size` is the model's: ids up to it that the files do not name decode as reserved tokens, and a vocabulary
    larger than it is refused. Raises TokenizerError.
    """
    return Tokenizer(read_vocabulary(path, vocab_size))
