"""The tokens of one generation as they come, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3ray.generation import Step
from k3ray.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token as it comes.

    text: what can be shown now ("" inside a character, and without a vocabulary). seconds: wall time of the step.
    logits: (vocab,) f32. is_end: whether it ends the message.
    """

    token_id: int
    text: str
    seconds: float
    logits: npt.NDArray[np.float32]
    is_end: bool


@dataclass(slots=True)
class Transcript:
    """A generation so far. Of the logits only the first step's are kept: a released row is 655 KB."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_logits: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    ended: bool = False

    def add(self, token: Token) -> None:
        """Keep a token."""
        if not self.ids:
            self.first_logits = token.logits
        self.ids.append(token.token_id)
        self.seconds.append(token.seconds)
        self.ended = token.is_end


def decoded(steps: Iterator[Step], gen: int, tokenizer: Tokenizer | None) -> Iterator[Token]:
    """Yield the steps with the text that can be shown after each; the last of gen steps shows what was held back."""
    decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
    for number, step in enumerate(steps, start=1):
        text = decoder.push(step.token_id) if decoder else ""
        if decoder and (step.is_end or number == gen):
            text += decoder.flush()
        yield Token(step.token_id, text, step.seconds, step.logits, step.is_end)
