"""Where the model lies that travels inside the package: small, random, every kind of layer (embedded/README.md)."""

from __future__ import annotations

from pathlib import Path

from k3ray.workers.failure import Failure

PACKAGE = Path(__file__).resolve().parent


class EmbeddedModelError(Failure):
    """The package is installed without its embedded model."""

    exit_code = 2


def embedded_model_dir() -> Path:
    """The directory of the embedded model, to be used like any downloaded one. Raises EmbeddedModelError."""
    # Beside this file, rather than through importlib.resources: the checkpoint's readers need a real directory anyway.
    folder = PACKAGE / "embedded"
    if not (folder / "config.json").is_file():
        raise EmbeddedModelError(
            f"{folder}: the embedded model is not there; install k3ray again from a complete wheel or checkout "
            "(and unpacked: a zipped package cannot be read from)"
        )
    return folder
