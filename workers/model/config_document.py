"""One config.json as a document: where each field lies, nested or flat, and every problem found in it, with its place.

Knows nothing of the model. The released file nests the text model under `text_config` and its KDA fields under
`text_config.linear_attn_config`; a flat file holds the same keys at the top. A field that occurs in two places with
two values is a problem, never a choice.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure

FILE_NAME = "config.json"
MAX_FILE_BYTES = 16 * 1024 * 1024  # the released file has 7 KB
TEXT = "text_config"
KDA = "linear_attn_config"


class ConfigError(Failure):
    """config.json cannot be used: the message lists every problem with its field, what was found and expected."""

    exit_code = 2

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = tuple(problems)
        lines = "\n".join(f"  {path.name}: {problem}" for problem in problems)
        super().__init__(
            f"{path}: {counted(len(problems), 'problem')} in the model's config; no field has a default, none is "
            f"guessed:\n{lines}\n"
            "Use the config.json that was published with the checkpoint, or correct these fields."
        )


def show(value: object) -> str:
    """A found value as one short line, its JSON type named where the text alone would mislead."""
    text = json.dumps(value, ensure_ascii=True)
    if len(text) > 80:
        text = f"{text[:60]}... ({len(text)} characters)"
    if isinstance(value, str):
        return f"{text} (a string)"
    if isinstance(value, float) and value.is_integer():
        return f"{text} (written with a fraction)"
    return text


def same(a: object, b: object) -> bool:
    """Whether two JSON values are the same; true and 1 are not."""
    if type(a) in (int, float) and type(b) in (int, float):
        return a == b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _places(kda: bool) -> tuple[tuple[str, ...], ...]:
    """Where a field may lie, the released file's place first."""
    return ((TEXT, KDA), (KDA,), (TEXT,), ()) if kda else ((TEXT,), ())


class ConfigDocument:
    """The parsed file and the list of its problems. Readers return None after noting a problem, and reading goes on."""

    def __init__(self, path: Path) -> None:
        """Parse `path` (a config.json or the directory that holds one); raises ConfigError when there is no object."""
        self.path = path / FILE_NAME if path.is_dir() else path
        self.problems: list[str] = []
        self._asked: set[str] = set()
        self.root: dict[str, Any] = self._parse(self._read())
        self.nested = TEXT in self.root
        for place in ((TEXT,), (KDA,), (TEXT, KDA)):
            found = self._at(place[:-1]).get(place[-1], {})
            if not isinstance(found, dict):
                self.note(".".join(place), show(found), "an object")

    def note(self, field: str, found: str, expected: str) -> None:
        """Record one problem."""
        self.problems.append(f"{field}: found {found}, expected {expected}")

    def raise_problems(self) -> None:
        """Raise ConfigError with everything noted, if anything was."""
        if self.problems:
            raise ConfigError(self.path, self.problems)

    def field(self, key: str, kda: bool = False) -> str:
        """The dotted place where `key` lies in this file, or would belong when it is missing, for messages."""
        for place in _places(kda):
            if key in self._at(place):
                return ".".join((*place, key))
        return ".".join([TEXT] * self.nested + [KDA] * kda + [key])

    def value(self, key: str, kda: bool = False, expected: str = "a value", required: bool = True) -> Any:
        """The one value of `key`, or None with a problem noted when it is missing or differs between two places."""
        self._asked.add(key)
        places = [place for place in _places(kda) if key in self._at(place)]
        found = [(".".join((*place, key)), self._at(place)[key]) for place in places]
        if not found:
            if required:
                self.note(self.field(key, kda), "nothing", expected)
            return None
        first, value = found[0]
        for other, another in found[1:]:
            if not same(value, another):
                self.note(f"{first} and {other}", f"{show(value)} and {show(another)}", "one value in both places")
                return None
        if value is None and required:
            self.note(first, "null", expected)
        return value

    def own_value(self, key: str, text: bool) -> Any:
        """The value of `key` in the file's top (or in the text model's object) alone; None when it is not there."""
        self._asked.add(key)
        return self._at((TEXT,) if text else ()).get(key)

    def whole(self, key: str, low: int, high: int, kda: bool = False) -> int | None:
        """A whole number low..high; true, 7168.0 and "7168" are not whole numbers."""
        expected = f"a whole number from {low} to {high}"
        value = self.value(key, kda, expected)
        if value is None or (type(value) is int and low <= value <= high):
            return value
        self.note(self.field(key, kda), show(value), expected)
        return None

    def real(self, key: str, above: float, below: float = math.inf, kda: bool = False) -> float | None:
        """A finite number strictly between two bounds; 4 and 4.0 are the same number."""
        expected = f"a finite number above {above:g}" if below == math.inf else f"a finite number below {below:g}"
        value = self.value(key, kda, expected)
        if value is None:
            return None
        if type(value) in (int, float):
            number = float(value) if abs(value) < 1e300 else math.inf
            if math.isfinite(number) and above < number < below:
                return number
        self.note(self.field(key, kda), show(value), expected)
        return None

    def flag(self, key: str, kda: bool = False) -> bool | None:
        """true or false; 1 and "true" are not flags."""
        value = self.value(key, kda, "true or false")
        if value is None or isinstance(value, bool):
            return value
        self.note(self.field(key, kda), show(value), "true or false")
        return None

    def wholes(self, key: str, kda: bool = False) -> list[int] | None:
        """A list of whole numbers."""
        expected = "a list of whole numbers"
        value = self.value(key, kda, expected)
        if value is None:
            return None
        if isinstance(value, list) and all(type(item) is int for item in value):
            return value
        self.note(self.field(key, kda), show(value), expected)
        return None

    def unasked(self, without_effect: frozenset[str]) -> tuple[str, ...]:
        """The dotted places of fields of the text model that nobody has asked for and that are not in the list."""
        known = self._asked | without_effect | {TEXT, KDA}
        places = ((), (TEXT,), (TEXT, KDA), (KDA,))
        return tuple(".".join((*place, key)) for place in places for key in self._at(place) if key not in known)

    def _at(self, place: tuple[str, ...]) -> dict[str, Any]:
        """The object at a place, empty when there is none (its wrong type is noted once, at construction)."""
        found: Any = self.root
        for key in place:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def _read(self) -> bytes:
        try:
            size = self.path.stat().st_size
            data = self.path.read_bytes() if size <= MAX_FILE_BYTES else b""
        except OSError as error:
            reason = f"nothing that can be read ({error.strerror})"
            raise ConfigError(self.path, [f"found {reason}, expected the checkpoint's {FILE_NAME}"]) from error
        if size > MAX_FILE_BYTES:
            raise ConfigError(self.path, [f"found {size} bytes, expected at most {MAX_FILE_BYTES}"])
        return data

    def _parse(self, data: bytes) -> dict[str, Any]:
        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            result = dict(items)
            if len(result) != len(items):
                for key, count in Counter(key for key, _ in items).items():
                    if count > 1:
                        self.note(json.dumps(key), f"the key {count} times in one object", "each key once")
            return result

        def constant(name: str) -> float:
            raise ValueError(f"{name} is not a JSON number")

        try:
            root = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
        except RecursionError as error:
            raise ConfigError(self.path, ["found JSON nested too deeply, expected a config object"]) from error
        except ValueError as error:  # bad JSON, bad UTF-8, NaN, or an integer of thousands of digits
            raise ConfigError(self.path, [f"found invalid JSON ({error}), expected a JSON object"]) from error
        if not isinstance(root, dict):
            raise ConfigError(self.path, [f"found {show(root)}, expected a JSON object"])
        return root
