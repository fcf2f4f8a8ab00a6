"""Random schedules: a scheduler with random limits, and requests that arrive at random times."""

from random import Random
from typing import Any
from unittest import mock

from serving.messages import AdapterRef
from serving.scheduler import scheduler as scheduler_module
from tests.support.fake_ranks import VOCAB_SIZE, make_adapter_ref
from tests.support.scheduler_harness import STEP_S, SchedulerHarness

ADAPTERS = [
    *(make_adapter_ref(f"digest-{count}", count) for count in (1, 3, 5, 6)),
    *(make_adapter_ref(f"prefix-{count}", count, "prefix") for count in (1, 4, 6)),
    *(
        make_adapter_ref(f"linears-{pages}", 0, "linears", linears=5, pages=pages)
        for pages in (1, 90, 200, 240)
    ),
    make_adapter_ref("rows-and-linears", 3, linears=7, pages=150),
    make_adapter_ref("prefix-and-linears", 4, "prefix", linears=2, pages=100),
]


class RandomSchedule:
    """A random scheduler and its random callers.

    `has_windows`: the model has several KV groups, or one with a window.
    """

    def __init__(self, seed: int, *, has_windows: bool = False, **settings: object) -> None:
        self.random = random = Random(seed)
        block_tokens = random.choice([1, 2, 4, 4, 4, 8])
        self.context = random.choice([8, 20, 40])
        blocks = 1 + -(-self.context // block_tokens) + random.choice([0, 0, 1, 2, 5, 10, 40])
        fault_rate = random.choice([0, 0, 0.02, 0.1])
        self.documents = [self.text(random.randrange(1, self.context)) for _ in range(3)]
        step_tokens = block_tokens * random.choice([1, 1, 2, 4, 16])
        drawn_settings: dict[str, Any] = {
            "blocks": blocks,
            "stages": random.choice([1, 1, 2, 3, 4]),
            "context": self.context,
            "prefix_write_tokens_max": random.choice([1, 3, 100]),
            "breaks": lambda sequence_id: random.random() < fault_rate,
            "kv_block_tokens": block_tokens,
            "step_tokens_max": step_tokens,
            "running_requests_max": min(step_tokens, random.choice([1, 2, 3, 8])),
            "prefix_cache": random.random() < 0.8,
            "adapter_rows_max": random.choice([6, 9, 20]),
            "adapter_memory_mb": random.choice([1, 2]),  # 244 or 488 pages.
            "priority_age_s": random.choice([0.02, 0.1, 10.0]),
            "prefill_stall_ms_max": random.choice([0.1, 1.0, 15.0]),
            "speculate_tokens_max": random.choice([0, 0, 1, 3, 5]),
            "speculate_rows_max": random.choice([2, 8, 8, 100]),
        }
        if has_windows:
            groups = random.choice([1, 1, 2, 3])
            windows = [random.choice([1, 2, 5, 8, 13]) for _ in range(groups)]
            if random.random() < 0.5:
                windows[0] = None  # type: ignore[call-overload]
            drawn_settings["windows"] = windows
            drawn_settings["blocks"] = (blocks - 1) * groups + 1
        # With limits below the scheduler's, small adapters are written in pieces, before prefills.
        step_bytes = random.choice([200_000, 500_000, 10 << 20])
        self.write_limits: dict[str, Any] = {
            "LINEAR_WRITE_BYTES_MAX": step_bytes,
            "IDLE_WRITE_BYTES_MAX": step_bytes * random.choice([1, 2]),
            "PREFILL_WRITE_BYTES_MAX": random.choice([0, 300_000, 1 << 20]),
        }
        self.harness = SchedulerHarness(**drawn_settings | settings)
        self.harness.records_steps = False

    def text(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE) for _ in range(count)]

    def prompt(self) -> tuple[list[int], AdapterRef | None]:
        random = self.random
        prompt = list(random.choice(self.documents)) if random.random() < 0.7 else []
        prompt = prompt[: random.choice([1, 100, 100])] + self.text(random.choice([0, 1, 3]))
        adapter = None
        if random.random() < 0.4:
            adapter = random.choice(ADAPTERS)
            for _ in range(1 if adapter.is_prefix else random.choice([1, 1, 2])):
                if adapter.is_prefix:
                    position = 0
                else:
                    middle = random.randrange(len(prompt) + 1)
                    position = random.choice([0, len(prompt), middle])
                prompt[position:position] = [VOCAB_SIZE + row for row in range(adapter.row_count)]
        return prompt[: self.context - 1] or [7], adapter

    def submit(self) -> None:
        random = self.random
        harness = self.harness
        prompt, adapter = self.prompt()
        new = random.choice([0, 1, 2, random.randrange(self.context)])
        new = min(new, self.context - len(prompt))
        stop_token_ids = tuple(self.text(random.choice([0, 0, 3])))
        settings = {
            "adapter_ref": adapter,
            "tenant": random.choice(["", "", "a", "b"]),
            "service": random.choice(["latency", "throughput"]),
            "priority": random.choice([0, 0, 1, 5]),
            "deadline": harness.now + random.random() if random.random() < 0.1 else None,
            "stop_token_ids": stop_token_ids,
            "logprobs": random.choice([None, 0]),
            "prompt_logprobs": random.choice([None, None, 0]),
            "unscored_tokens": random.choice([0, random.randrange(len(prompt))]),
        }
        if adapter is not None and adapter.changes_linears and not adapter.is_prefix:
            settings["adapted_from"] = random.choice([0, random.randrange(len(prompt))])
        for _ in range(random.choice([1, 1, 1, 4])):
            harness.submit(prompt, new, **settings)
        if random.random() < 0.1:  # A sequence that continues after its first ranks were lost.
            tokens = harness.expected(prompt, new, **settings).tokens
            output_tokens = tokens[: random.randrange(len(tokens) + 1)]
            harness.submit(prompt, new, **settings, output_tokens=output_tokens)

    def run(self, arrivals: int) -> None:
        with mock.patch.multiple(scheduler_module, **self.write_limits):
            self._run(arrivals)

    def _run(self, arrivals: int) -> None:
        random = self.random
        harness = self.harness
        first_step = harness.committed
        steps_max = first_step + 2000 * arrivals
        while arrivals or harness.scheduler.has_unfinished or harness.in_flight:
            if arrivals and (random.random() < 0.4 or not harness.scheduler.has_unfinished):
                arrivals -= 1
                self.submit()
            if random.random() < 0.05 and harness.ranks.expected:
                harness.scheduler.cancel([random.choice(list(harness.ranks.expected))])
            if len(harness.in_flight) < harness.depth and random.random() < 0.9:
                harness.plan()
            elif harness.in_flight:
                harness.commit()
            harness.now += STEP_S * random.random()
            assert harness.committed < steps_max, "the schedule does not end"
        for output in harness.scheduler.pop_ended():
            harness.receive(output)
        harness.check_finished()
        # Preemption does not waste more than a bounded number of steps.
        tokens = sum(len(expected.states) for expected in harness.ranks.expected.values())
        assert harness.committed - first_step <= tokens + 100
