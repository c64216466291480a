"""The list of mistakes that must not pass: tests/mutations/*.toml as records, and what it takes to put one in.

It does not run anything: scripts/mutations does.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "mutations"


class BadRecord(ValueError):
    """A record that cannot be used as it stands."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake, as an edit of one file.

    mistake: in words. old: text that occurs exactly once in `file`; new: what stands there instead. caught_by: pytest
    node ids, each of which must fail. raises: the exception with which they fail where it is not a failed assertion.
    """

    name: str
    mistake: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    raises: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the mistake in it; BadRecord when the place is not there exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise BadRecord(f"{self.name}: the old text occurs {count} times in {self.file}, expected once")
        return text.replace(self.old, self.new)


def read_mutations(folder: Path = FOLDER) -> list[Mutation]:
    """Every record of the folder's files, in the order of files and lines; BadRecord for names that occur twice."""
    mutations: list[Mutation] = []
    for path in sorted(folder.glob("*.toml")):
        document = tomllib.loads(path.read_text("utf-8"))
        for fields in document.pop("mutation", []):
            mutations.append(Mutation(**fields | {"caught_by": tuple(fields["caught_by"])}))
        if document:
            raise BadRecord(f"{path.name}: found {', '.join(document)}, expected mutation")
    names = [mutation.name for mutation in mutations]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadRecord(f"names that occur twice: {', '.join(twice)}")
    return mutations
