"""Vocabularies for tests, as the tokenizer's two files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

SINGLE_BYTES = [bytes([byte]) for byte in range(256)]


def write_vocabulary(folder: Path, tokens: list[bytes], added: dict[str, Any]) -> Path:
    """A folder with these tokens by rank, and what tokenizer_config.json says of the added ones."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder
