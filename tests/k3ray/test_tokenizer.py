"""The tokenizer against cases others computed, the released split answers, any bytes and any stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.text_cutting import SPLIT_PATTERN
from k3ray.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from k3ray.vocabulary import TokenizerError
from tests.vocabularies import SINGLE_BYTES, write_vocabulary

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "k3b"
K3B = load_tokenizer(GOLDEN)
# Every script, class and marker that the split treats differently; the joined character is three code points.
NASTY = (
    "\0中文字。日本語です I'll 'T 1〇〇〇 x々y "
    "\u0301e\u200d👩‍💻 \u3000\x85\u2028 \r\n\t<|end_of_msg|> [EOS] ^^^ ﷽ 𠀀 ǅʰ"
)


def whole_piece_vocabulary(folder: Path, text: str) -> Tokenizer:
    """A vocabulary in which every stretch of the text is one token: then ids show how the text was split."""
    data = text.encode()
    stretches = {data[low:high] for low in range(len(data)) for high in range(low + 2, len(data) + 1)}
    return load_tokenizer(write_vocabulary(folder, SINGLE_BYTES + sorted(stretches, key=lambda s: (len(s), s)), {}))


@pytest.fixture(params=["k3a", "k3b"])
def golden(request: pytest.FixtureRequest) -> tuple[Tokenizer, dict[str, Any]]:
    folder = request.getfixturevalue(f"{request.param}_dir")
    return load_tokenizer(folder), json.loads((folder / "tok_cases.json").read_text())


def test_golden_cases(golden: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, cases = golden
    assert len(cases["cases"]) == 66
    assert tokenizer.num_ranks == cases["n_ranks"]
    assert tokenizer.vocab_size == cases["n_ranks"] + cases["n_special"]
    assert cases["pat_str"] == SPLIT_PATTERN
    for case in cases["cases"]:
        text = case["text"]
        assert tokenizer.encode_template(text) == case["ids"], text
        assert tokenizer.encode(text) == case["ids_no_special"], text
        assert tokenizer.encode(text.encode()) == case["ids_no_special"], text
        assert tokenizer.decode(case["ids"]) == text
        assert tokenizer.decode(case["ids_no_special"]) == text


def test_golden_chat_segments(golden: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, cases = golden
    ids: list[int] = []
    for text, is_marker in cases["chat_segments"]:
        ids += [tokenizer.added_id(text)] if is_marker else tokenizer.encode(text)
    assert ids == cases["chat_ids"]


@pytest.mark.parametrize(
    "pieces",
    [
        [" ", "中文"],
        ["1〇〇", "〇"],
        ["A", "中", "B"],
        ["x", "々", "y"],
        ["!\n", "/x"],
        ["The", " capital", " of", " France", " is"],
        ["I'm"],
        [" Chat"],
        ["GPT"],
        [" CAN"],
        ["'T"],
        ["——"],
        ["中文字", "。日本語です"[0], "日本語", "です"],
        ["123", "456", "7"],
        ["we", "'\n", "x"],
    ],
)
def test_split(tmp_path: Path, pieces: list[str]) -> None:
    tokenizer = whole_piece_vocabulary(tmp_path, "".join(pieces))
    ids = tokenizer.encode("".join(pieces))
    assert [tokenizer.decode([token]) for token in ids] == pieces


def test_user_cannot_type_an_added_token() -> None:
    for name, token in K3B.added_tokens.items():
        assert token not in K3B.encode(f"a{name}b") and K3B.decode(K3B.encode(name)) == name
        assert token not in K3B.encode(name.encode())
        assert K3B.encode_template(f"a{name}b") == [*K3B.encode("a"), token, *K3B.encode("b")]


def test_added_tokens_and_their_kinds() -> None:
    assert list(K3B.added_tokens.values()) == list(range(480, 512))
    assert K3B.decode([500, 482, 503]) == "<|media_end|><|end_of_msg|><|reserved_token_503|>"
    markers = [K3B.added_id(name) for name in ("<|open|>", "<|close|>", "<|sep|>")]
    assert markers == [483, 484, 485]
    assert K3B.special_ids.isdisjoint(markers) and 482 in K3B.special_ids
    with pytest.raises(TokenizerError, match="osagent"):
        K3B.added_id("<osagent_mode>")


def test_end_ids() -> None:
    assert K3B.end_ids(482) == K3B.end_ids((482,)) == {481, 482}
    assert K3B.end_ids([482, 484]) == {481, 482, 484}
    with pytest.raises(TokenizerError, match="512"):
        K3B.end_ids(512)


def test_end_ids_without_an_eos_token(tmp_path: Path) -> None:
    assert load_tokenizer(write_vocabulary(tmp_path, SINGLE_BYTES, {"256": {"content": "[X]"}})).end_ids(256) == {256}


def test_released_geometry(tmp_path: Path) -> None:
    """163,584 ranks and 256 added slots as in the release: its ids come out, 163600 is reserved and decodes."""
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    triples = [bytes([a, b, 1]) for a in range(256) for b in range(256)]
    more = [bytes([a, b, 2]) for a in range(256) for b in range(256)]
    tokens = [*SINGLE_BYTES, *pairs, *triples, *more][:163_584]
    named = {163_584: "[BOS]", 163_585: "[EOS]", 163_586: "<|end_of_msg|>", 163_839: "[PAD]"}
    folder = write_vocabulary(tmp_path, tokens, {str(i): {"content": c, "special": True} for i, c in named.items()})
    for tokenizer in (load_tokenizer(folder), load_tokenizer(folder / "tiktoken.model", 163_840)):
        assert (tokenizer.num_ranks, tokenizer.vocab_size, len(tokenizer.added_tokens)) == (163_584, 163_840, 256)
        assert tokenizer.decode([163_600]) == "<|reserved_token_163600|>"
        assert tokenizer.encode_template("<|reserved_token_163600|>") == [163_600]
        assert 163_600 not in tokenizer.encode("<|reserved_token_163600|>")
        assert tokenizer.end_ids(163_586) == {163_585, 163_586}


def test_vocab_size_of_the_model() -> None:
    padded = load_tokenizer(GOLDEN, 520)
    assert padded.vocab_size == 520 and padded.decode([519]) == "<|reserved_token_519|>"
    assert padded.encode("x [PAD]") == K3B.encode("x [PAD]")
    for size in (511, 480, 256):
        with pytest.raises(TokenizerError, match=f"vocab_size is {size}"):
            load_tokenizer(GOLDEN, size)
    with pytest.raises(TokenizerError, match="at most 65536"):
        load_tokenizer(GOLDEN, 10**9)


@pytest.mark.parametrize("bad", [-1, 512, 2**31, 2**63])
def test_ids_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(TokenizerError, match=rf"id {bad} .* 0\.\.511"):
        K3B.decode([5, bad])
    with pytest.raises(TokenizerError):
        StreamDecoder(K3B).push(bad)


# --- round trips -------------------------------------------------------------------------------------------------


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=300))
def test_any_bytes_round_trip(data: bytes) -> None:
    assert K3B.decode_bytes(K3B.encode(data)) == data


@settings(deadline=None)  # the machine may be busy
@given(st.text(max_size=200) | st.text(alphabet=NASTY, max_size=200))
def test_any_text_round_trips(text: str) -> None:
    ids = K3B.encode(text)
    assert K3B.decode(ids) == text
    assert all(token < K3B.num_ranks for token in ids)
    assert K3B.encode(text.encode()) == ids
    assert K3B.decode(K3B.encode_template(text)) == text


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\xef\xbb\xbfx", b"\xc3", b"a\xe4\xb8", b"\xed\xa0\x80", b"\0"])
def test_bytes_that_are_not_utf8(data: bytes) -> None:
    assert K3B.decode_bytes(K3B.encode(data)) == data
    assert K3B.decode(K3B.encode(data)) == data.decode("utf-8", "replace")


def test_damaged_bytes_leave_the_text_beside_them_alone() -> None:
    ids = K3B.encode(b"Hello " + b"\xff\xfe" + b" world")
    assert ids == [*K3B.encode("Hello "), *(K3B.encode(bytes([b]))[0] for b in b"\xff\xfe"), *K3B.encode(" world")]


# --- streaming ---------------------------------------------------------------------------------------------------


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(0, 511), max_size=60))
def test_streamed_text_is_the_decoded_text(ids: list[int]) -> None:
    decoder = StreamDecoder(K3B)
    parts = [decoder.push(token) for token in ids] + [decoder.flush()]
    assert "".join(parts) == K3B.decode(ids)


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet=NASTY, max_size=60))
def test_stream_never_shows_half_a_character(text: str) -> None:
    decoder = StreamDecoder(K3B)
    shown = ""
    for token in K3B.encode(text):
        shown += decoder.push(token)
        assert text.startswith(shown)
    assert shown == text and decoder.flush() == ""


def test_stream_flushes_what_is_left_and_begins_anew() -> None:
    decoder = StreamDecoder(K3B)
    first, second, third = K3B.encode("世".encode()[:1] + b"\xff")[0], *(K3B.encode(bytes([b]))[0] for b in b"\xb8\x96")
    assert [decoder.push(first), decoder.push(second), decoder.flush()] == ["", "", "�"]
    assert [decoder.push(first), decoder.push(second), decoder.push(third), decoder.flush()] == ["", "", "世", ""]
