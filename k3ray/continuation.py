"""What --load-state and --save-state mean for one generation: what it begins with and what is kept of it.

Checked before any work; what may be saved when it is interrupted or fails is decided here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from k3ray.cluster.memory_parts import state_bytes
from k3ray.driver import Driver
from k3ray.files import OutputFailure, check_writable
from k3ray.generation import GreedySequence, Resumption
from k3ray.report import decimal_size
from k3ray.state_file import SavedSequence, open_state, write_state
from k3ray.state_identity import identify, refuse_other_model
from k3ray.workers.actors import versions
from k3ray.workers.failure import Failure
from k3ray.workers.loading import Checkpoint

Say = Callable[[str], None]


class Continuation:
    """The saved states that one generation is begun from and ended with; either may be None."""

    def __init__(
        self, checkpoint: Checkpoint, load_state: Path | str | None, save_state: Path | str | None, say: Say
    ) -> None:
        """Prove the state to be loaded and the place to save to; StateRefused, StateDamaged, OtherModel, OutputFailure.

        say: hears what was loaded, and what goes on after an interruption.
        """
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
                f"loaded: {self._loaded.path}, {len(self._loaded.ids)} ids of which {saved.num_committed} need not be "
                "run again"
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
        pieces = driver.snapshot(sequence.session) if committed else ()
        prompt_ids, generated_ids = sequence.ids[: self._num_prompt], sequence.ids[self._num_prompt :]
        saved = SavedSequence(prompt_ids, generated_ids, committed, logits)
        write_state(self._path, self._identity, saved, pieces, f"k3ray {versions()['k3ray']}")
        size = decimal_size(self._path.stat().st_size)
        self.saved = (
            f"saved: {self._path}, {len(sequence.ids)} ids of which {committed} need not be run again, {size}; "
            f"next: --load-state {self._path}"
        )

    def save_after(self, error: BaseException, driver: Driver, sequence: GreedySequence) -> None:
        """Save what is sound after a generation that did not end by itself.

        After Ctrl-C the step in progress is finished and saved with its state; at a second Ctrl-C, and after a failure,
        the ids alone are saved.
        """
        if self._path is None:
            return
        if isinstance(error, KeyboardInterrupt):
            self._say("interrupted: the step in progress ends first and is saved; Ctrl-C again: only the ids are")
            try:
                sequence.settle()
                self.save(driver, sequence)
                return
            except (Failure, KeyboardInterrupt):
                pass  # the ids are still good
        self._save_ids(sequence)

    def _save_ids(self, sequence: GreedySequence) -> None:
        """Save the ids alone when any was generated: what state there is may be lost or damaged. They are run anew."""
        if self._path is None or self._identity is None or len(sequence.ids) == self._num_prompt:
            return
        saved = SavedSequence(sequence.ids[: self._num_prompt], sequence.ids[self._num_prompt :], 0)
        try:
            write_state(self._path, self._identity, saved, (), f"k3ray {versions()['k3ray']}")
        except OutputFailure as error:
            self.saved = str(error)  # what ended the generation is what is raised
            return
        self.saved = f"saved: {self._path}, {len(sequence.ids)} ids without state, to be run again"
