"""The tokenizer against cases others computed, the released split answers, and texts that break tokenizers."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray import tokenizer as tokenizer_module
from k3ray.text_cutting import MAX_PIECE, MAX_RUN, SPLIT_PATTERN, cut_text, repair_surrogates, split_valid_utf8
from k3ray.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from k3ray.vocabulary import TokenizerError

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "k3b"
K3B = load_tokenizer(GOLDEN)
SINGLE_BYTES = [bytes([byte]) for byte in range(256)]
# Every script, class and marker that the split treats differently; the joined character is three code points.
NASTY = (
    "\0中文字。日本語です I'll 'T 1〇〇〇 x々y "
    "\u0301e\u200d👩‍💻 \u3000\x85\u2028 \r\n\t<|end_of_msg|> [EOS] ^^^ ﷽ 𠀀 ǅʰ"
)


def write_vocabulary(folder: Path, tokens: list[bytes], added: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder


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


@given(st.binary(max_size=300))
def test_any_bytes_round_trip(data: bytes) -> None:
    assert K3B.decode_bytes(K3B.encode(data)) == data


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


@given(st.binary(max_size=100))
def test_split_valid_utf8(data: bytes) -> None:
    stretches = list(split_valid_utf8(data))
    assert b"".join(s.encode() if isinstance(s, str) else s for s in stretches) == data
    assert all(stretches)
    # Neighbours differ in kind, so a valid stretch is as long as it can be.
    assert all(isinstance(a, str) != isinstance(b, str) for a, b in pairwise(stretches))


def test_surrogates() -> None:
    assert repair_surrogates("a\ud83d\ude00b\ud800c\udcffd") == "a😀b�c�d"
    assert K3B.encode("a\ud83d\ude00b") == K3B.encode("a😀b")
    assert K3B.encode("\udfff") == K3B.encode_template("\ud800") == K3B.encode("�")


# --- cutting -----------------------------------------------------------------------------------------------------


def cut_by_the_rule(text: str, max_piece: int, max_run: int) -> list[str]:
    """The rule in the words of its description, one character at a time."""
    pieces = []
    for low in range(0, len(text), max_piece):
        current, run, space = "", 0, None
        for character in text[low : low + max_piece]:
            run = run + 1 if character.isspace() == space else 1
            space = character.isspace()
            if run > max_run:
                pieces.append(current)
                current, run = "", 1
            current += character
        pieces.append(current)
    return pieces


@given(st.text(alphabet=" \n\u3000ab中^", max_size=80), st.integers(1, 30), st.integers(1, 9))
def test_cutting_follows_the_rule(text: str, max_piece: int, max_run: int) -> None:
    assert list(cut_text(text, max_piece, max_run)) == cut_by_the_rule(text, max_piece, max_run)


def test_space_class_is_isspace() -> None:
    """The cut uses a regular expression; for every code point it must agree with str.isspace."""
    for code in range(0x110000):
        character = chr(code)
        if character.isspace() != (len(list(cut_text(" " + character, 9, 1))) == 2):
            pytest.fail(f"U+{code:04X}")


def test_hostile_text_is_cut_to_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def recorded(text: str) -> list[str]:
        pieces = list(cut_text(text))
        seen.extend(map(len, pieces))
        return pieces

    monkeypatch.setattr(tokenizer_module, "cut_text", recorded)
    for character in (" ", "^", "\n", "a", "A", "中", "\u0301", "1"):
        seen.clear()
        text = character * 1_200_000
        ids = K3B.encode(text)
        assert seen == [MAX_RUN] * 48
        assert K3B.decode(ids) == text
    seen.clear()
    assert K3B.decode(K3B.encode("a " * 600_000)) == "a " * 600_000
    assert seen == [MAX_PIECE] * 3


def test_a_long_run_is_cut_where_the_rule_says() -> None:
    """Sixteen spaces are one token here, so that a cut at 25,000 shows in the ids."""
    sixteen, nine = K3B.encode(" " * 16), K3B.encode(" " * 9 + "x")
    assert len(sixteen) == 1
    ids = K3B.encode(" " * 25_009 + "x")
    assert ids == [*K3B.encode(" " * 25_000), *nine]


# --- streaming ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 511), max_size=60))
def test_streamed_text_is_the_decoded_text(ids: list[int]) -> None:
    decoder = StreamDecoder(K3B)
    parts = [decoder.push(token) for token in ids] + [decoder.flush()]
    assert "".join(parts) == K3B.decode(ids)


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


# --- files that must be refused ----------------------------------------------------------------------------------


def replace_line(number: int, line: bytes) -> Any:
    def edit(data: bytes) -> bytes:
        lines = data.splitlines()
        lines[number] = line
        return b"\n".join(lines)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (replace_line(300, b"!!! 300"), r"tiktoken\.model:301: .*not base64"),
        (replace_line(300, b"QUI 300"), r":301: .*not base64"),
        (replace_line(300, b"QUI="), r":301: expected a base64 token"),
        (replace_line(300, b"QUI= 300 1"), r":301: expected"),
        (replace_line(300, b"QUI= -1"), r":301: expected"),
        (replace_line(300, b"QUI= 3e2"), r":301: expected"),
        (replace_line(300, b"QUI= 99999999999999999999"), r":301: expected"),
        (replace_line(300, b"IQ== 300"), r":301: token b'!' has rank 300 here and 0 before"),
        (replace_line(300, b"AQIDBAU= 299"), r":301: rank 299 is already taken by line 300"),
        (replace_line(300, b"AQIDBAU= 480"), r"480 ranks reach 480 and rank 300 is missing"),
        (replace_line(300, b""), r"479 ranks reach 479 and rank 300 is missing"),
        (replace_line(0, b"AQIDBAU= 0"), r"1 of the 256 single bytes have no rank, the first is 0x21"),
        (lambda data: b"", r"empty, expected lines"),
        (lambda data: b"\0" * 100, r":1: expected"),
        (lambda data: b"\n".join(data.splitlines()[:400]), r"begin at id 480, expected 400"),
    ],
)
def test_bad_ranks(tmp_path: Path, edit: Any, message: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(edit((GOLDEN / "tiktoken.model").read_bytes()))
    (tmp_path / "tokenizer_config.json").write_bytes((GOLDEN / "tokenizer_config.json").read_bytes())
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path, 512)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no object added_tokens_decoder"),
        ('{"added_tokens_decoder": []}', "no object added_tokens_decoder"),
        ('{"added_tokens_decoder": {"480": {"content": "a"}, "480": {"content": "b"}}}', "'480' is given twice"),
        ('{"added_tokens_decoder": {"479": {"content": "a"}}}', r"'479'.*inside the ranks 0\.\.479"),
        ('{"added_tokens_decoder": {"-1": {"content": "a"}}}', "'-1'.*expected a token id"),
        ('{"added_tokens_decoder": {"0481": {"content": "a"}}}', "'0481'.*expected a token id"),
        ('{"added_tokens_decoder": {"²": {"content": "a"}}}', "expected a token id"),
        ('{"added_tokens_decoder": {"480": {"content": "b"}, "999999999": {"content": "a"}}}', "at most 65536"),
        (
            '{"added_tokens_decoder": {"480": {"content": "a"}, "482": {"content": "a"}}}',
            "480 and 482 are both named 'a'",
        ),
        ('{"added_tokens_decoder": {"481": {"content": "a"}}}', "begin at id 481, expected 480"),
        (
            '{"added_tokens_decoder": {"480": {"content": "<|reserved_token_481|>"}, "482": {"content": "a"}}}',
            "480 and 481 are both named",
        ),
        ('{"added_tokens_decoder": {"481": {"content": ""}}}', "non-empty string content"),
        ('{"added_tokens_decoder": {"481": {"content": 7}}}', "non-empty string content"),
        ('{"added_tokens_decoder": {"481": {"content": "a", "special": 1}}}', "boolean special"),
        ('{"added_tokens_decoder": {"481": "a"}}', "expected an object"),
        ('{"added_tokens_decoder": {"481": {"content": "\\ud800"}}}', "lone surrogate"),
    ],
)
def test_bad_added_tokens(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes((GOLDEN / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes((GOLDEN / "tiktoken.model").read_bytes())
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: cannot be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(tmp_path / "nothing")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, [*SINGLE_BYTES, b"ab"], {})
    assert load_tokenizer(tmp_path).encode("abc") == [256, 99]
    write_vocabulary(tmp_path, [*SINGLE_BYTES, b"bc"], {})
    assert load_tokenizer(tmp_path).encode("abc") == [97, 256]


@given(st.binary(max_size=200), st.binary(max_size=60))
def test_any_files_load_or_are_refused(tmp_path_factory: pytest.TempPathFactory, ranks: bytes, config: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "tiktoken.model").write_bytes((GOLDEN / "tiktoken.model").read_bytes() + b"\n" + ranks)
    (folder / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(TokenizerError):
        load_tokenizer(folder)
