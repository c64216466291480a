"""What --load-state and --save-state mean for one generation: what it begins with and what is kept of it.

Checked before any work; what may be saved when it is interrupted or fails is decided here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.amounts import decimal_size
from k3ray.cluster.actor_calls import ActorLost
from k3ray.cluster.memory_parts import state_bytes
from k3ray.driver import Driver
from k3ray.files import OutputFailure, check_writable
from k3ray.generation import GreedySequence, Resumption
from k3ray.state_file import SavedSequence, open_state, write_state
from k3ray.state_identity import identify, refuse_other_model
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure
from k3ray.workers.loading import Checkpoint
from k3ray.workers.model.snapshot import StatePiece
from k3ray.workers.process_report import versions

Say = Callable[[str], None]
Float32Array = npt.NDArray[np.float32]
SETTLE_S = 2.0  # after Ctrl-C: for the step in progress
SAVE_S = 30.0  # then: for the stages to give what they remember


class Continuation:
    """The saved states that one generation is begun from and ended with; either may be None."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        load_state: Path | str | None,
        save_state: Path | str | None,
        say: Say,
        rescue_folder: Path | None = None,
    ) -> None:
        """Prove the state to be loaded and the place to save to; StateRefused, StateDamaged, OtherModel, OutputFailure.

        say: hears what was loaded, and what goes on after an interruption. rescue_folder: for the sequence of a run
        that loses its actors for good and has no save_state; None: it is not saved then.
        """
        self._checkpoint = checkpoint
        self._rescue_folder = rescue_folder
        self._config = checkpoint.config
        self._path = Path(save_state) if save_state is not None else None
        self._say = say
        self._identity = None
        self._loaded = None
        self._num_prompt = 0
        self.saved = ""  # the line about what was saved
        if self._path is not None:
            check_writable(self._path, "--save-state")
        if load_state is not None:
            self._loaded = open_state(Path(load_state))
        if save_state is not None or load_state is not None:
            self._identity = identify(checkpoint)
        if self._loaded is not None and self._identity is not None:
            saved = self._loaded.document
            refuse_other_model(self._loaded.path, saved.identity, self._identity, checkpoint.reader.index.directory)
            say(
                f"loaded: {self._loaded.path}, {counted(len(self._loaded.ids), 'id')} of which "
                f"{saved.num_committed} need not be run again"
            )

    def whole_prompt(self, ids: Sequence[int]) -> list[int]:
        """Return the saved ids, if any, and after them the new ones."""
        before = self._loaded.ids if self._loaded is not None else []
        return [*before, *ids]

    def check_room(self, num_positions: int) -> None:
        """Refuse, before any work, a place with less room than the state of so many positions takes."""
        if self._path is None:
            return
        needed = state_bytes(self._config, range(self._config.num_hidden_layers), num_positions)
        free = shutil.disk_usage(self._path.parent).free
        if free < needed:
            raise OutputFailure(
                f"--save-state {self._path}: found {decimal_size(free)} free in {self._path.parent}, expected "
                f"{decimal_size(needed)} for the state of {num_positions} positions; make room or name another place"
            )

    def begin(self, driver: Driver, prompt_ids: Sequence[int], gen: int, incremental: bool) -> GreedySequence:
        """Open the sequence, from its saved state when there is one."""
        self._num_prompt = len(prompt_ids)
        resumption = None
        if self._loaded is not None:
            document = self._loaded.document
            resumption = Resumption(document.num_committed, self._loaded.pieces, self._loaded.logits)
        return GreedySequence(driver, prompt_ids, gen, incremental, resumption)

    def save(self, driver: Driver, sequence: GreedySequence) -> None:
        """Save the sequence with its state, when that was asked for."""
        if self._path is None or self._identity is None:
            return
        committed, logits = sequence.num_committed, sequence.logits
        if committed == len(sequence.ids) and logits is None:
            committed = 0  # nothing would be left to run, and what it gave is lost: it is run anew
        pieces = driver.snapshot(sequence.session) if committed else iter(())
        self._write(self._path, sequence, committed, logits, pieces)

    def save_after(self, error: BaseException, driver: Driver, sequence: GreedySequence) -> None:
        """Save what is sound after a generation that did not end by itself.

        After Ctrl-C the step in progress has SETTLE_S to end and is saved with its state. Where that is not to be had,
        and when actors were lost for good, the last state that was kept of all layers is saved, else the ids alone; so
        are they at a second Ctrl-C and when a step has failed, as what state there is then is not trusted. A sequence
        of lost actors is saved also where nobody asked for it (rescue_folder).
        """
        lost = isinstance(error, Failure) and error.exit_code == ActorLost.exit_code  # whoever found it: a stage, too
        if lost and self._path is None and self._rescue_folder is not None:
            self._rescue(driver, sequence)
        if self._path is None:
            return
        try:
            if isinstance(error, KeyboardInterrupt) and self._save_settled(driver, sequence):
                return
            if lost or isinstance(error, KeyboardInterrupt):
                self._save_kept(self._path, driver, sequence)
                return
        except (Failure, KeyboardInterrupt):
            pass  # the ids are still good
        self._save_ids(self._path, sequence)

    def _save_settled(self, driver: Driver, sequence: GreedySequence) -> bool:
        """Save the state as it is when the step in progress has ended; False when that takes too long or fails."""
        self._say(
            f"interrupted: the step in progress has {SETTLE_S:g} s to end, then what is committed is saved; Ctrl-C "
            "again: only the ids are"
        )
        try:
            driver.limit(SETTLE_S)
            sequence.settle()
            driver.limit(SAVE_S)
            self.save(driver, sequence)
        except Failure:
            return False
        finally:
            driver.limit(None)
        return True

    def _rescue(self, driver: Driver, sequence: GreedySequence) -> None:
        """Save a sequence where nobody has named a file; whatever is in the way of that is no second failure."""
        assert self._rescue_folder is not None
        path = self._rescue_folder / f"rescued-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.state"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._identity = self._identity or identify(self._checkpoint)
            self._save_kept(path, driver, sequence)
        except (Failure, OSError) as error:
            self.saved = f"the sequence could not be saved in {path.parent}: {error}"

    def _save_kept(self, path: Path, driver: Driver, sequence: GreedySequence) -> None:
        """Save the last state that was kept of all layers, which asks no process; else the ids alone."""
        committed, pieces = driver.restore_point(sequence.session)
        if not 0 < committed < len(sequence.ids):
            self._save_ids(path, sequence)
            return
        try:
            self._write(path, sequence, committed, None, pieces)
        except OutputFailure:
            self._save_ids(path, sequence)

    def _save_ids(self, path: Path, sequence: GreedySequence) -> None:
        """Save the ids alone when any was generated: what state there is may be lost or damaged. They are run anew."""
        if len(sequence.ids) == self._num_prompt:
            return
        try:
            self._write(path, sequence, 0, None, ())
        except OutputFailure as error:
            self.saved = str(error)  # what ended the generation is what is raised

    def _write(
        self,
        path: Path,
        sequence: GreedySequence,
        committed: int,
        logits: Float32Array | None,
        pieces: Iterable[tuple[StatePiece, pa.Buffer]],
    ) -> None:
        assert self._identity is not None
        prompt_ids, generated_ids = sequence.ids[: self._num_prompt], sequence.ids[self._num_prompt :]
        saved = SavedSequence(prompt_ids, generated_ids, committed, logits)
        write_state(path, self._identity, saved, pieces, f"k3ray {versions()['k3ray']}")
        size, model = decimal_size(path.stat().st_size), self._checkpoint.reader.index.directory
        kept = f"of which {committed} need not be run again" if committed else "without state, to be run again"
        again = f"k3ray generate {model} " if path != self._path else ""
        self.saved = (
            f"saved: {path}, {counted(len(sequence.ids), 'id')} {kept}, {size}; next: {again}--load-state {path}"
        )
