"""An opened model: its processes while it runs, its tokens as they come, the report at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from k3ray.cluster.budget_plan import BudgetPlan
from k3ray.cluster.devices import device_name
from k3ray.cluster.placed_budget import PlacedBudget
from k3ray.continuation import Continuation
from k3ray.driver import Driver
from k3ray.environment import read_environment
from k3ray.generation import generate
from k3ray.model_source import ModelSource
from k3ray.prompt import check_gen, choose_prompt
from k3ray.report import Generation, Settings
from k3ray.starting import Run, RunRequest, start_run
from k3ray.tokenizer import Tokenizer, load_tokenizer
from k3ray.transcript import Token, Transcript, decoded
from k3ray.workers.cache.trace import ExpertRequest
from k3ray.workers.failure import Failure
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.process_report import versions

Say = Callable[[str], None]


class ContextFailure(Failure):
    """A sequence longer than the memory was divided for."""

    exit_code = 2


class Model:
    """A checked model with a plan. Started by start() or by the first token; close() leaves nothing behind."""

    def __init__(
        self,
        source: ModelSource,
        request: RunRequest,
        settings: Settings,
        say: Say,
    ) -> None:
        self.source = source
        self.plan = request.plan  # what runs, since start()
        self.settings = settings
        self._request = request
        self._checkpoint = request.checkpoint
        self.budget: BudgetPlan | PlacedBudget | None = None  # since start()
        self._positions = 0  # what the budget was made for
        self._say = say
        self._running = ExitStack()
        self._driver: Driver | None = None
        self._run: Run | None = None
        self._recovered = 0  # recoveries before the last generation began
        self.partial: Generation | None = None  # what a generation that failed had given before
        self.saved = ""  # what the last generation's save_state did, in a line
        self.tokenizer: Tokenizer | None = None
        if source.tokenizer is not None:
            self.tokenizer = load_tokenizer(source.tokenizer, self.config.vocab_size)

    @property
    def config(self) -> ModelConfig:
        """The model's config, cut to the layers that are run."""
        return self._checkpoint.config

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prompt_ids(
        self,
        prompt: str | bytes | None = None,
        prompt_file: Path | str | None = None,
        ids: Sequence[int] | None = None,
        optional: bool = False,
    ) -> list[int]:
        """Return the ids of exactly one of prompt (text or bytes), prompt_file (bytes) and ids; optional: or none."""
        return choose_prompt(prompt, prompt_file, ids, self.tokenizer, self.config.vocab_size, optional)

    def start(self, context: int = 1) -> None:
        """Divide the memory for sequences of `context` positions, start or join Ray, start the actors, load.

        Does nothing when that is done, and refuses a longer context than it was done for.
        """
        if self._driver is not None:
            if context > self._positions:
                raise ContextFailure(
                    f"this model was started for sequences of {self._positions} positions, found {context}; open it "
                    "with context= of the longest, or close it first"
                )
            return
        self._positions = max(context, self._request.memory.context or 0)
        try:
            self._run = start_run(self._request, self._positions, self._running, self._say)
        except BaseException:
            self.close()
            raise
        self.plan, self.budget, self._driver = self._run.plan, self._run.budget, Driver(self._run.chain)

    def close(self) -> None:
        """End the actors, and Ray when this model started it; the model can be started again."""
        self._driver = self._run = None
        self._running.close()

    def stream(
        self,
        prompt: str | bytes | None = None,
        *,
        prompt_file: Path | str | None = None,
        ids: Sequence[int] | None = None,
        gen: int = 8,
        incremental: bool = True,
        ignore_eos: bool = False,
    ) -> Iterator[Token]:
        """Return an iterator over the tokens as they come; arguments as in generate(), checked before it returns."""
        check_gen(gen)
        prompt_ids = self.prompt_ids(prompt, prompt_file, ids)
        self.start(len(prompt_ids) + gen)
        assert self._driver is not None
        end_ids = () if ignore_eos else self.end_ids()
        return decoded(generate(self._driver, prompt_ids, gen, end_ids, incremental), gen, self.tokenizer)

    def generate(
        self,
        prompt: str | bytes | None = None,
        *,
        prompt_file: Path | str | None = None,
        ids: Sequence[int] | None = None,
        gen: int = 8,
        incremental: bool = True,
        ignore_eos: bool = False,
        on_token: Callable[[Token], None] = lambda token: None,
        save_state: Path | str | None = None,
        load_state: Path | str | None = None,
    ) -> Generation:
        """Generate greedily up to gen tokens and return them with what they cost.

        Exactly one of prompt (text, or its bytes), prompt_file (its bytes as they are) and ids, at most 32,768
        tokens; gen at most 4,096. incremental: keep the state between steps instead of running the whole sequence
        for each; the bits are the same. ignore_eos: go on after an end-of-message id. on_token: hears every token.
        save_state: a file for the sequence and its state at the end (docs/state.md). load_state: such a file, whose
        sequence goes on: the prompt comes after it, and may be left out.
        """
        asked: dict[str, Any] = {"gen": gen, "incremental": incremental, "ignore_eos": ignore_eos}
        asked |= {"load_state": load_state and str(load_state), "save_state": save_state and str(save_state)}
        check_gen(gen)
        new_ids = self.prompt_ids(prompt, prompt_file, ids, optional=load_state is not None)
        rescue_folder = read_environment().rescue_folder
        state = Continuation(self._checkpoint, load_state, save_state, self._say, rescue_folder)
        transcript = Transcript(state.whole_prompt(new_ids))
        self.partial, self.saved = None, ""
        state.check_room(len(transcript.prompt_ids) + gen)
        self.start(len(transcript.prompt_ids) + gen)
        assert self._run is not None and self._driver is not None
        chain = self._run.chain
        self._recovered = len(chain.recoveries)
        before = chain.counts()
        with state.begin(self._driver, transcript.prompt_ids, gen, incremental) as sequence:
            try:
                steps = sequence.steps(gen, () if ignore_eos else self.end_ids())
                for token in decoded(steps, gen, self.tokenizer):
                    transcript.add(token)
                    on_token(token)
                damaged, io = chain.damaged_met(), chain.counts() - before
                state.save(self._driver, sequence)
                self.saved = state.saved
            except (Failure, KeyboardInterrupt) as error:
                state.save_after(error, self._driver, sequence)
                self.saved = state.saved
                if transcript.ids:
                    why = str(error) if isinstance(error, Failure) else "interrupted"
                    self.partial = self._report(transcript, asked, f"stopped: {why}", [], None)
                raise
        stop_reason = "end of message" if transcript.ended else "as many as asked"
        return self._report(transcript, asked, stop_reason, damaged, io)

    def record_routing(self, context: int = 1) -> None:
        """Start, and keep from now on which experts every token chooses."""
        self.start(context)
        assert self._run is not None
        self._run.chain.record_routing()

    def recorded_routing(self) -> list[ExpertRequest]:
        """Return the requests since record_routing, pass by pass, within a pass layer by layer, then by token."""
        assert self._run is not None
        kept = self._run.chain.recorded_routing()
        return [ExpertRequest(layer, tuple(row)) for _, layer, ids in kept for row in ids.tolist()]

    def end_ids(self) -> frozenset[int]:
        """Return the ids that end a message: the config's, and the vocabulary's [EOS] where there is one."""
        config_ids = frozenset(self.config.eos_token_id)
        return config_ids if self.tokenizer is None else self.tokenizer.end_ids(self.config.eos_token_id)

    def _report(
        self,
        transcript: Transcript,
        asked: dict[str, Any],
        stop_reason: str,
        damaged: list[tuple[int, int]],
        io: IoCounts | None,
    ) -> Generation:
        run = self._run
        assert run is not None and self.budget is not None
        run.memory.sample()
        peaks = run.far_peaks(whole=io is not None)
        if line := run.unanswered(peaks):
            self._say(line)
        nodes, messages = run.node_reports(peaks), run.message_report(io.messages) if io is not None else None
        tape = self._request.memory.tape
        return Generation(
            model=str(self.source.model_dir),
            ray=run.runtime.describe(),
            prompt_ids=transcript.prompt_ids,
            generated_ids=transcript.ids,
            text=self.tokenizer.decode(transcript.ids) if self.tokenizer is not None else None,
            stop_reason=stop_reason,
            layers=self.config.num_hidden_layers,
            step_seconds=transcript.seconds,
            settings={**asdict(run.settings(self.settings)), **asked},
            versions=versions(),
            peak_memory_bytes=sum(node.measured_bytes for node in nodes) or run.memory.peak_bytes,
            peak_memory_by_process=run.peaks(peaks),
            planned_memory_bytes=self.budget.total_bytes,
            planned_memory=self.budget.parts(),
            io=io,
            trunk_device=device_name(tape.folder if tape is not None else self.source.model_dir),
            expert_device=device_name(self.source.model_dir),
            damaged_experts=damaged,
            recoveries=list(run.chain.recoveries[self._recovered :]),
            nodes=list(nodes),
            messages=messages,
            first_logits=transcript.first_logits,
        )
