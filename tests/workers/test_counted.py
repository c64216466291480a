"""One of a thing is not several."""

from __future__ import annotations

from k3ray.workers.counted import counted


def test_one_and_several() -> None:
    assert [counted(number, "stage") for number in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert [counted(number, "process") for number in (1, 12_288)] == ["1 process", "12,288 processes"]
