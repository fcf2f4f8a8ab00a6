"""Schedules of requests, drawn at random."""

from random import Random
from typing import Any

from serving.messages import AdapterRef
from tests.support.fake_ranks import VOCAB_SIZE, Play, adapter

ADAPTERS = [
    *(adapter(f"digest-{count}", count) for count in (1, 3, 5, 6)),
    *(adapter(f"prefix-{count}", count, "prefix") for count in (1, 4, 6)),
]


class Drawn:
    """A random server and its random callers."""

    def __init__(self, seed: int, **settings: object) -> None:
        self.random = random = Random(seed)
        self.size = random.choice([1, 2, 4, 4, 4, 8])
        self.context = random.choice([8, 20, 40])
        blocks = 1 + -(-self.context // self.size) + random.choice([0, 0, 1, 2, 5, 10, 40])
        self.fault_rate = random.choice([0, 0, 0.02, 0.1])
        self.documents = [self.text(random.randrange(1, self.context)) for _ in range(3)]
        tokens = self.size * random.choice([1, 1, 2, 4, 16])
        chosen: dict[str, Any] = {
            "blocks": blocks,
            "stages": random.choice([1, 1, 2, 3, 4]),
            "context": self.context,
            "fill_tokens_max": random.choice([1, 3, 100]),
            "breaks": lambda number: random.random() < self.fault_rate,
            "kv_block_tokens": self.size,
            "step_tokens_max": tokens,
            "running_requests_max": min(tokens, random.choice([1, 2, 3, 8])),
            "prefix_cache": random.random() < 0.8,
            "adapter_rows_max": random.choice([6, 9, 20]),
            "priority_age_s": random.choice([0.02, 0.1, 10.0]),
            "prefill_stall_ms_max": random.choice([0.1, 1.0, 15.0]),
            "speculate_tokens_max": random.choice([0, 0, 1, 3, 5]),
            "speculate_rows_max": random.choice([2, 8, 8, 100]),
        }
        self.play = Play(**chosen | settings)
        self.play.keep = False

    def text(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE) for _ in range(count)]

    def prompt(self) -> tuple[list[int], AdapterRef | None]:
        random = self.random
        prompt = list(random.choice(self.documents)) if random.random() < 0.7 else []
        prompt = prompt[: random.choice([1, 100, 100])] + self.text(random.choice([0, 1, 3]))
        rows = None
        if random.random() < 0.4:
            rows = random.choice(ADAPTERS)
            for _ in range(1 if rows.is_prefix else random.choice([1, 1, 2])):
                at = (
                    0
                    if rows.is_prefix
                    else random.choice([0, len(prompt), random.randrange(len(prompt) + 1)])
                )
                prompt[at:at] = [VOCAB_SIZE + row for row in range(rows.row_count)]
        prompt = prompt[: self.context - 1] or [7]
        return prompt, rows

    def submit(self) -> None:
        random = self.random
        play = self.play
        prompt, rows = self.prompt()
        new = random.choice([0, 1, 2, random.randrange(self.context)])
        new = min(new, self.context - len(prompt))
        stops = tuple(self.text(random.choice([0, 0, 3])))
        how = {
            "adapter_ref": rows,
            "tenant": random.choice(["", "", "a", "b"]),
            "service": random.choice(["latency", "throughput"]),
            "priority": random.choice([0, 0, 1, 5]),
            "deadline": play.now + random.random() if random.random() < 0.1 else None,
            "stop_token_ids": stops,
            "logprobs": random.choice([None, 0]),
            "prompt_logprobs": random.choice([None, None, 0]),
            "unscored_tokens": random.choice([0, random.randrange(len(prompt))]),
        }
        for _ in range(random.choice([1, 1, 1, 4])):
            play.submit(prompt, new, **how)
        if random.random() < 0.1:  # One that began on ranks that are gone.
            whole = play.alone(prompt, new, **how).tokens
            play.submit(prompt, new, **how, output_tokens=whole[: random.randrange(len(whole) + 1)])

    def run(self, arrivals: int) -> None:
        random = self.random
        play = self.play
        begun = play.committed
        most = begun + 2000 * arrivals
        while arrivals or play.scheduler.has_unfinished or play.flights:
            if arrivals and (random.random() < 0.4 or not play.scheduler.has_unfinished):
                arrivals -= 1
                self.submit()
            if random.random() < 0.05 and play.ranks.alone:
                play.scheduler.cancel([random.choice(list(play.ranks.alone))])
            if len(play.flights) < play.depth and random.random() < 0.9:
                play.plan()
            elif play.flights:
                play.commit()
            play.now += 0.01 * random.random()
            assert play.committed < most, "it does not come to an end"
        for made in play.scheduler.pop_ended():
            play.take(made)
        play.check_over()
        # Steps are not spent on taking places from one another.
        needed = sum(len(alone.states) for alone in play.ranks.alone.values())
        assert play.committed - begun <= needed + 100
