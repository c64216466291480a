"""What a proof of a checkpoint found: one finding a check, the problems by file, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PASS, FAIL, UNCHECKED = "pass", "FAIL", "not checked"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one file of the folder; refetch: whether fetching it again may help."""

    file: str
    text: str
    refetch: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result. detail: what was compared with what, or why it was not."""

    check: str
    status: str
    detail: str
    problems: tuple[Problem, ...] = ()


def finding(check: str, detail: str, problems: Iterable[Problem] = ()) -> Finding:
    """A check that was done: it fails when there is a problem."""
    found = tuple(problems)
    return Finding(check, FAIL if found else PASS, detail, found)


def unchecked(check: str, why: str) -> Finding:
    """A check that was not done."""
    return Finding(check, UNCHECKED, why)


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings of one folder. partial: which part of the model it holds by its download's note, None: all.

    proven: files whose checksum was computed and is right; fetching them again would bring the same bytes.
    repairable: whether it is known where the files come from.
    """

    directory: str
    findings: tuple[Finding, ...]
    partial: str | None
    proven: frozenset[str]
    repairable: bool

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(found.status != FAIL for found in self.findings)

    @property
    def problems(self) -> list[Problem]:
        """Every problem, in the order of the checks."""
        return [problem for found in self.findings for problem in found.problems]

    @property
    def fetch_again(self) -> list[str]:
        """The files to fetch again, each once."""
        return sorted({p.file for p in self.problems if p.refetch} - self.proven)
