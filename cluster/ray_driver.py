"""Connecting this process to a Ray cluster as its driver: quietly, and with the reason told when it fails."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray

from k3ray.cluster.signals import kept_signals
from k3ray.workers.failure import Failure

PRINTS = "_worker_logs_enabled"  # private to Ray: whether a driver prints what its cluster tells it


class RayFailure(Failure):
    """Ray could not be started or joined: the settings or the cluster have to change first."""

    exit_code = 2


def connect(address: str, **options: Any) -> None:
    """`ray.init` at `address` ("local" starts one) that writes nothing to the terminal and leaves our signals alone.

    Errors that Ray would report by itself reach the caller as exceptions of the calls they concern; the printed
    copies (worker output, deaths of workers, hints) are left out. Raises RayFailure with Ray's reason.
    """
    quieten()
    try:
        with kept_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except Exception as error:  # whatever Ray raises, its user gets one message
        ray.shutdown()
        where = "start" if address == "local" else f"connect to the cluster at {address}"
        raise RayFailure(f"Ray did not {where}: {reason_of(error)}") from error


@contextmanager
def silent_ray() -> Iterator[None]:
    """Within it Ray does not print its cluster's messages (the death of a worker) into our standard output."""
    internals = vars(importlib.import_module("ray._private.worker"))
    before = internals.get(PRINTS)
    internals[PRINTS] = False
    try:
        yield
    finally:
        internals[PRINTS] = before


def quieten() -> None:
    """Ray writes its progress and advice to the terminal; what matters of it reaches the user in our own words."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def reason_of(error: BaseException) -> str:
    """The first line of the innermost cause, which is where Ray says what happened."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the processes that are started within it; puts back what it found."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def authentication(mode: str, **values: str) -> Iterator[None]:
    """Lets Ray in this process and in those it starts use tokens or not ("token", "disabled"); puts back the user's."""
    try:
        with variables({"RAY_AUTH_MODE": mode, **values}):
            _read_again()
            yield
    finally:
        _read_again()


def _read_again() -> None:
    """Ray reads its settings and the token once per process: make it read them again."""
    with suppress(ImportError, AttributeError):  # a Ray that has no tokens
        internals = importlib.import_module("ray._raylet")
        internals.AuthenticationTokenLoader.instance().reset_cache()
        internals.Config.initialize("")
