"""A process that its run has given up ends itself; one that is merely cut off goes on."""

from __future__ import annotations

import threading

import pytest

from k3ray.workers.fence import Fence


class Ended:
    def __init__(self) -> None:
        self.codes: list[int] = []
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.happened.set()


def test_given_up() -> None:
    ended, answers = Ended(), iter([False, False, True])
    Fence(lambda: next(answers), lambda: 7, ended, look_s=0.001).begin()
    assert ended.happened.wait(5) and ended.codes == [1]


def test_the_nodes_own_process_has_ended() -> None:
    ended, parents = Ended(), iter([7, 7, 1])
    Fence(lambda: False, lambda: next(parents), ended, look_s=0.001).begin()
    assert ended.happened.wait(5)


@pytest.mark.parametrize("error", [ConnectionError("cut off"), AttributeError("another Ray")])
def test_a_head_that_cannot_be_asked_is_no_verdict(error: Exception) -> None:
    ended, asked = Ended(), threading.Event()
    count = [0]

    def ask() -> bool:
        count[0] += 1
        if count[0] > 3:
            asked.set()
        raise error

    fence = Fence(ask, lambda: 7, ended, look_s=0.001)
    fence.begin()
    fence.begin()
    assert asked.wait(5) and not ended.codes
    fence.stop()
