"""Prompts and numbers that cannot be run are refused with one clear sentence; nothing is cut, wrapped or guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.api import open_model
from k3ray.prompt import (
    MAX_GEN,
    MAX_PROMPT,
    PromptFailure,
    check_gen,
    check_prompt,
    choose_prompt,
    parse_ids,
    read_prompt_file,
    require_tokenizer,
)
from k3ray.whole_number import NotWhole
from k3ray.workers.failure import Failure


@pytest.mark.parametrize(
    "text", ["abc", "3,x,5", "3.5,7", ",", "", "3,", "-1", "1e3", "٣", "3;4", "+3", "0x10", "3 4", "9" * 5000]
)
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


def test_a_file_without_an_end_is_not_read_for_ever() -> None:
    with pytest.raises(PromptFailure, match=r"--prompt-file /dev/zero: found more than \d+ bytes, expected at most"):
        read_prompt_file(Path("/dev/zero"))


def test_text_without_a_vocabulary_names_ids() -> None:
    with pytest.raises(PromptFailure, match="--ids"):
        require_tokenizer(None)


@pytest.mark.parametrize(
    "ids", [[3.0], [3.5], [True], ["3"], [None], [[3]], np.array([3.7]), np.array([True]), "35", b"\x03", {"a": 1}]
)
def test_ids_that_are_no_whole_numbers(ids: Any) -> None:
    with pytest.raises(Failure, match=r"ids: (item 1: )?found .*whole number") as caught:
        choose_prompt(None, None, ids, None, 512)
    assert caught.value.exit_code == 2


def test_ids_of_any_whole_kind_are_the_same_ids() -> None:
    for ids in ([3, 5, 7], (3, 5, 7), range(3, 8, 2), np.array([3, 5, 7]), np.array([3, 5, 7], np.uint8)):
        found = choose_prompt(None, None, ids, None, 512)  # type: ignore[arg-type]  # numpy's ids are as good as ours
        assert found == [3, 5, 7] and all(type(token_id) is int for token_id in found)


@pytest.mark.parametrize("gen", [2.5, 3.0, True, "3", None, float("nan")])
def test_gen_is_a_whole_number(gen: Any) -> None:
    with pytest.raises(NotWhole, match=r"--gen: found .*, expected a whole number"):
        check_gen(gen)


@pytest.mark.parametrize("name", ["layers", "stages", "expert_shards", "threads", "snapshot_every", "max_recoveries"])
@pytest.mark.parametrize("value", [2.0, True, "2"])
def test_numbers_of_the_api_are_whole(k3b_dir: Path, name: str, value: Any) -> None:
    with pytest.raises(NotWhole, match=f"--{name.replace('_', '-')}: found .*, expected a whole number"):
        open_model(k3b_dir, **{name: value})


@pytest.mark.parametrize(("value", "reason"), [(0, "1 or more"), (-1, "1 or more"), (2.5, "a whole number")])
def test_positions_to_plan_for_are_a_count(k3b_dir: Path, value: Any, reason: str) -> None:
    with pytest.raises(NotWhole, match=f"context: found {value}, expected {reason}"):
        open_model(k3b_dir, context=value)
