"""Scheduler harness: a scheduler with fake ranks and a simulated clock, checked at every step."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import Outcome, Phases, SequenceOutput, Step, Submission, TokenScore
from serving.scheduler.scheduler import Scheduler
from tests.support.fake_ranks import VOCAB_SIZE, ExpectedSequence, FakeRanks

STEP_S = 0.01  # Duration of a step on the simulated clock.
SUBMISSION_FIELDS = frozenset(
    {
        "adapter_ref",
        "tenant",
        "service",
        "priority",
        "deadline",
        "guide",
        "output_tokens",
        "unscored_tokens",
        "adapted_from",
    }
)


class SchedulerHarness:
    """A scheduler, its fake ranks and its callers. An outcome returns at most `depth` steps later.

    The dicts are indexed by sequence id.
    """

    def __init__(
        self,
        *,
        blocks: int = 64,
        stages: int = 1,
        context: int = 10_000,
        prefix_write_tokens_max: int = 256,
        windows: Sequence[int | None] = (None,),
        breaks: Callable[[int], bool] = lambda sequence_id: False,
        **config: object,
    ) -> None:
        settings = {"model": "", "kv_block_tokens": 4, "step_tokens_max": 16, **config}
        settings.setdefault("running_requests_max", settings["step_tokens_max"])
        self.config = ServerConfig(**settings)  # type: ignore[arg-type]
        self.stages = stages
        async_scheduling = stages == 1 and self.config.uses_async_scheduling("cpu")
        self.depth = stages + async_scheduling  # Steps that may be in flight.
        # Steps that were planned before the tokens of the previous step were known.
        self.async_steps = 0
        self.scheduler = Scheduler(
            vocab_size=VOCAB_SIZE,
            blocks=blocks,
            scheduler_config=self.config.scheduler_config,
            cache_config=self.config.cache_config,
            context_tokens_max=context,
            stages=stages,
            prefix_write_tokens_max=prefix_write_tokens_max,
            async_scheduling=async_scheduling,
            windows=windows,
        )
        self.prefix_write_tokens_max = prefix_write_tokens_max
        self.ranks = FakeRanks(blocks, self.config.cache_config.kv_block_tokens, breaks, windows)
        self.now = 0.0
        self.submissions = 0
        self.in_flight: deque[tuple[Step, Outcome]] = deque()
        self.steps: list[Step] = []
        self.records_steps = True
        self.committed = 0  # Committed steps.
        self.tokens: dict[int, list[int]] = {}
        self.prompt_scores: dict[int, list[TokenScore | None]] = {}
        self.last_outputs: dict[int, SequenceOutput] = {}
        self.first_token_steps: dict[int, int] = {}  # The value of `committed` at that time.
        self.end_steps: dict[int, int] = {}
        self.cached_tokens: dict[int, int] = {}
        self.arrivals: dict[int, float] = {}
        self.phases: dict[int, Phases] = {}

    def submit(self, prompt: Iterable[int], new: int = 4, **settings: object) -> int:
        """Queue a prompt and return its sequence id.

        `settings` are fields of the submission or of its sampling parameters.
        """
        submission = self.next_submission(prompt, new, **settings)
        sequence_id = submission.sequence_id
        self.submissions += 1
        self.arrivals[sequence_id] = self.now
        self.ranks.register(submission)
        self.tokens[sequence_id] = list(submission.output_tokens)
        self.prompt_scores[sequence_id] = []
        final_output = self.scheduler.add_sequence(submission, self.now)
        if final_output:
            self.receive(final_output)
        return sequence_id

    def next_submission(self, prompt: Iterable[int], new: int, **settings: object) -> Submission:
        sequence_id = self.submissions
        fields = {name: settings[name] for name in settings if name in SUBMISSION_FIELDS}
        rules = {name: settings[name] for name in settings if name not in SUBMISSION_FIELDS}
        sampling = SamplingParams(max_new_tokens=new, seed=sequence_id, **rules)  # type: ignore[arg-type]
        return Submission(sequence_id, list(prompt), sampling, **fields)  # type: ignore[arg-type]

    def expected(self, prompt: Iterable[int], new: int, **settings: object) -> ExpectedSequence:
        """Return what the next submission will generate if it has these settings."""
        return ExpectedSequence(self.next_submission(prompt, new, **settings))

    def receive(self, output: SequenceOutput) -> None:
        sequence_id = output.sequence_id
        assert sequence_id not in self.end_steps, "a message after the end"
        self.tokens[sequence_id] += output.tokens
        self.prompt_scores[sequence_id] += output.prompt_scores
        if output.tokens:
            self.first_token_steps.setdefault(sequence_id, self.committed)
            self.cached_tokens.setdefault(sequence_id, output.cached_tokens)
        if output.phases is not None:
            self.check_phases(sequence_id, output.phases)
        if output.tokens or output.end == "scored":
            assert sequence_id in self.phases
        self.last_outputs[sequence_id] = output
        if output.end:
            self.end_steps[sequence_id] = self.committed

    def check_phases(self, sequence_id: int, phases: Phases) -> None:
        """Check that the phases are sent once, and cover the time from arrival to first token."""
        assert sequence_id not in self.phases
        self.phases[sequence_id] = phases
        total = phases.queue_s + phases.prefill_s
        assert abs(total - (self.now - self.arrivals[sequence_id])) < 1e-6
        assert phases.queue_s >= 0 and phases.decode_s == 0

    def plan(self) -> Step | None:
        """Plan a step, check it and run it; its outcome is in flight until `commit`."""
        step = self.scheduler.plan(self.now)
        for output in self.scheduler.pop_ended():
            self.receive(output)
        if step is None:
            idle = self.scheduler.has_unfinished and not self.in_flight
            assert not idle, "sequences wait, but nothing runs and nothing is planned"
            return None
        assert len(self.in_flight) < self.depth, "more steps in flight than stages"
        self.check_limits(step)
        is_async = bool(step.token_ids) and set(step.token_ids) == {-1}
        assert is_async == (len(self.in_flight) == self.stages), "a step was planned too early"
        self.async_steps += is_async
        for earlier_step, _ in self.in_flight:
            samples = zip(earlier_step.slots, earlier_step.draws, strict=True)
            sampling_slots = {slot for slot, draws in samples if draws}
            assert is_async or sampling_slots.isdisjoint(step.slots), (
                "a sequence whose next token is unknown is in a second step"
            )
        self.in_flight.append((step, self.ranks.run(step)))
        if self.records_steps:
            self.steps.append(step)
        return step

    def check_limits(self, step: Step) -> None:
        limits = self.config.scheduler_config
        assert len(step.token_ids) == sum(step.lengths) <= limits.step_tokens_max
        assert len(step.slots) <= limits.running_requests_max
        assert step.slots or step.prefix_writes or step.linear_writes, "an empty step"
        prefix_tokens = sum(write.count for write in step.prefix_writes)
        assert prefix_tokens <= self.prefix_write_tokens_max
        speculated = sum(1 + count for count in step.draft_counts if count)
        assert speculated <= limits.speculate_rows_max, "too many draft tokens in a step"
        assert all(count <= limits.speculate_tokens_max for count in step.draft_counts)

    def commit(self) -> None:
        """Commit the outcome of the oldest step in flight."""
        _, outcome = self.in_flight.popleft()
        for output in self.scheduler.commit(outcome, self.now):
            self.receive(output)
        self.committed += 1
        self.scheduler.check(deep=True)

    def step(self) -> bool:
        """Do what the engine loop does: fill the stages, then commit one outcome.

        Returns False if no step was in flight.
        """
        while len(self.in_flight) < self.depth and self.plan():
            pass
        if not self.in_flight:
            return False
        self.commit()
        self.now += STEP_S
        return True

    def finish(self, steps_max: int = 10_000) -> None:
        for _ in range(steps_max):
            if not self.step():
                break
        assert not self.scheduler.has_unfinished, f"not finished after {steps_max} steps"
        self.check_finished()

    def check_finished(self) -> None:
        """Check that each sequence ended as if it had run alone, and all resources are free."""
        stats = self.scheduler.stats
        assert (stats.waiting, stats.running, stats.blocks_held) == (0, 0, 0)
        assert self.end_steps.keys() == self.ranks.expected.keys()
        for sequence_id, expected in self.ranks.expected.items():
            tokens = self.tokens[sequence_id]
            end = self.last_outputs[sequence_id].end
            if end not in ("stop", "length", "scored"):
                assert tokens == expected.tokens[: len(tokens)]
                continue
            assert tokens == expected.tokens and end == expected.end_reason
            submission = expected.submission
            if submission.sampling.prompt_logprobs is not None:
                scores = [] if submission.output_tokens else expected.prompt_scores
                assert self.prompt_scores[sequence_id] == scores[submission.unscored_tokens :]

    def discard_records(self) -> None:
        """Discard the records of ended sequences, so that only the scheduler's memory can grow."""
        for record in (
            self.tokens,
            self.prompt_scores,
            self.last_outputs,
            self.first_token_steps,
            self.end_steps,
            self.cached_tokens,
            self.arrivals,
            self.phases,
            self.ranks.expected,
            self.ranks.computed_tokens,
        ):
            record.clear()
