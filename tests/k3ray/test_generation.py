"""Which id comes next."""

from __future__ import annotations

import numpy as np
import pytest

from k3ray.generation import greedy


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([0, 3, 1, 3, 3], 1), ([-1, -1], 0), ([-0.0, 0.0], 0), ([np.float32(1e-45), 0, np.float32(1e-45)], 0), ([5], 0)],
)
def test_equal_logits_go_to_the_lower_id(logits: list[float], expected: int) -> None:
    assert greedy(np.array(logits, np.float32)) == expected
