"""Reading a TOML file strictly: every key is known, of its type and within its bounds, or the file is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from k3ray.workers.failure import Failure

MAX_TOML_BYTES = 1 << 20


class TomlFailure(Failure):
    """A file that is not understood: which field, what was found, what was expected."""

    exit_code = 2

    def __init__(self, path: Path, field: str, found: str, expected: str) -> None:
        self.path, self.field = path, field
        super().__init__(f"{path}{f': {field}' if field else ''}: found {found}, expected {expected}")


def read_toml(path: Path, what: str) -> TomlTable:
    """Parse the file; `what` says which file is expected. Raises TomlFailure."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TOML_BYTES + 1)
        if len(text) > MAX_TOML_BYTES:
            raise TomlFailure(path, "", f"more than {MAX_TOML_BYTES} bytes", what)
        document = tomllib.loads(text.decode())
    except OSError as error:
        raise TomlFailure(path, "", f"no file that can be read ({error.strerror})", what) from None
    except (ValueError, RecursionError) as error:
        raise TomlFailure(path, "", f"no TOML ({error})", what) from None
    return TomlTable(path, "", document)


class TomlTable:
    """One table of a file; `finish` refuses the keys that nobody asked for."""

    def __init__(self, path: Path, place: str, values: dict[str, Any]) -> None:
        self.path = path
        self._place = place
        self._values = values
        self._asked: set[str] = set()

    def refuse(self, key: str, expected: str) -> TomlFailure:
        """The failure that says what is under the key and what should be."""
        found = f"{self._values[key]!r}"[:80] if key in self._values else "nothing"
        return TomlFailure(self.path, self._field(key), found, expected)

    def text(self, key: str, expected: str, default: str | None = None) -> str:
        """A non-empty string."""
        value = self._take(key, default)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self.refuse(key, expected)
        return value

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from low to high."""
        value = self._take(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"a whole number from {low} to {high}")
        return value

    def rate(self, key: str, high: float, default: float | None = None) -> float:
        """A number above zero, at most `high`."""
        value = self._take(key, default)
        if type(value) not in (int, float) or not 0 < value <= high:
            raise self.refuse(key, f"a number above 0 and at most {high:g}")
        return float(value)

    def texts(self, key: str, expected: str) -> list[str]:
        """A list of non-empty strings, empty where the key is absent."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise self.refuse(key, expected)
        return value

    def tables(self, key: str, expected: str) -> list[TomlTable]:
        """A non-empty list of tables ([[key]])."""
        value = self._take(key, [])
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.refuse(key, expected)
        return [TomlTable(self.path, self._field(f"{key}[{place}]"), item) for place, item in enumerate(value)]

    def table(self, key: str, expected: str) -> TomlTable:
        """A table."""
        value = self._take(key, None)
        if not isinstance(value, dict):
            raise self.refuse(key, expected)
        return TomlTable(self.path, self._field(key), value)

    def keys(self) -> Iterable[str]:
        """The keys in the order of the file."""
        return self._values.keys()

    def finish(self) -> None:
        """Raise TomlFailure for the first key that was not asked for."""
        for key in self._values:
            if key not in self._asked:
                raise self.refuse(key, f"one of the known fields: {', '.join(sorted(self._asked))}")

    def _take(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        return self._values.get(key, default)

    def _field(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key
