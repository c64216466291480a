"""Prompts and numbers that cannot be run are refused with one clear sentence; nothing is cut, wrapped or guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3ray.prompt import (
    MAX_GEN,
    MAX_PROMPT,
    PromptFailure,
    check_gen,
    check_prompt,
    parse_ids,
    read_prompt_file,
    require_tokenizer,
)


@pytest.mark.parametrize("text", ["abc", "3,x,5", "3.5,7", ",", "", "3,", "-1", "1e3", "٣", "3;4", "+3", "0x10", "3 4"])
def test_malformed_ids_are_refused(text: str) -> None:
    with pytest.raises(PromptFailure, match=r"--ids: item \d+ is .*expected whole numbers like 3,5,7"):
        parse_ids(text)


def test_ids_are_read_as_they_are() -> None:
    assert parse_ids("3,5, 7") == [3, 5, 7]
    assert parse_ids("4294967299") == [4294967299]


@pytest.mark.parametrize(("ids", "reason"), [
    ([], "empty"),
    ([512], "item 1 is 512, expected 0 to 511"),
    ([3, 4294967299], "item 2 is 4294967299"),
    ([-1], "item 1 is -1"),
    ([1] * (MAX_PROMPT + 1), f"{MAX_PROMPT + 1} tokens, expected at most {MAX_PROMPT}"),
])  # fmt: skip
def test_prompts_that_cannot_be_run(ids: list[int], reason: str) -> None:
    with pytest.raises(PromptFailure, match=reason):
        check_prompt(ids, 512)


def test_the_longest_prompt_is_accepted() -> None:
    check_prompt([1] * MAX_PROMPT, 512)


@pytest.mark.parametrize("gen", [0, -1, MAX_GEN + 1, 2**31])
def test_gen_out_of_range(gen: int) -> None:
    with pytest.raises(PromptFailure, match=f"--gen: found {gen}, expected 1 to 4096"):
        check_gen(gen)


def test_files_are_read_as_bytes(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"\xff\xfe\r\n\x00")
    assert read_prompt_file(file) == b"\xff\xfe\r\n\x00"
    with pytest.raises(PromptFailure, match="No such file"):
        read_prompt_file(tmp_path / "none")
    with pytest.raises(PromptFailure, match="directory"):
        read_prompt_file(tmp_path)


def test_text_without_a_vocabulary_names_ids() -> None:
    with pytest.raises(PromptFailure, match="--ids"):
        require_tokenizer(None)
