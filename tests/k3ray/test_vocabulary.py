"""Vocabulary files that must be refused, and why each is; a changed file is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.tokenizer import load_tokenizer
from k3ray.vocabulary import TokenizerError
from tests.vocabularies import SINGLE_BYTES, write_vocabulary

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "k3b"


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


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=200), st.binary(max_size=60))
def test_any_files_load_or_are_refused(tmp_path_factory: pytest.TempPathFactory, ranks: bytes, config: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "tiktoken.model").write_bytes((GOLDEN / "tiktoken.model").read_bytes() + b"\n" + ranks)
    (folder / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(TokenizerError):
        load_tokenizer(folder)
