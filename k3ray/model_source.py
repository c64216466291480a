"""Which model a run uses and which vocabulary goes with it, and who said so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3ray.embedded_model import embedded_model_dir
from k3ray.environment import Environment
from k3ray.workers.failure import Failure


class ModelSourceFailure(Failure):
    """A model folder or vocabulary that is not there."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ModelSource:
    """model_dir: the checkpoint's folder. said_by: what named it. tokenizer: the vocabulary's path, if there is one."""

    model_dir: Path
    said_by: str
    tokenizer: Path | None

    def describe(self) -> str:
        """Return the first line of a run."""
        return f"model: {self.model_dir} ({self.said_by})"


def find_model(model_dir: Path | None, tok: Path | None, environment: Environment) -> ModelSource:
    """Choose the model (argument, K3_MODEL_DIR, embedded) and the vocabulary (argument, K3_TOK_FILES, the model's)."""
    if model_dir is not None:
        found, said_by = model_dir, "named on the command line or in the call"
    elif environment.model_dir is not None:
        found, said_by = environment.model_dir, "named by K3_MODEL_DIR"
    else:
        found, said_by = embedded_model_dir(), "the embedded model: small random weights, text without meaning"
    if not found.is_dir():
        raise ModelSourceFailure(f"model folder {found}: there is no such folder; name the folder with config.json")
    tokenizer = tok or environment.tokenizer
    if tokenizer is None and (found / "tiktoken.model").is_file():
        tokenizer = found
    if tokenizer is not None and not tokenizer.exists():
        raise ModelSourceFailure(f"--tok {tokenizer}: no such file or folder; name the one with tiktoken.model")
    return ModelSource(found, said_by, tokenizer)
