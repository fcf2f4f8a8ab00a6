"""Golden examples of adapters, replayed by the running engine: does each still say what it said?

One adapter after the other, from the server's start on and whenever one is new. An example is a
request like any other, of the lowest priority, a few at a time, and only where there is room to
spare. What came of it goes to the log and the metrics; in a strict server an adapter with examples
is served, and current beside others of its name, once they have passed.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gpt.adapters.card import Golden
from gpt.adapters.golden_examples import (
    TOKENS_MAX,
    Outcome,
    Replay,
    compare,
    golden_prompt,
    tolerance_of,
)
from gpt.errors import AdapterError, RequestError
from gpt.generation.completions import NEW_TOKENS
from gpt.tokenizers.tokenizer import Tokenizer
from serving.adapters.directory import Resident
from serving.adapters.registry import Adapters
from serving.admission.admission import PRIORITY_MAX, Admission
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.engine.stream import completions
from serving.request import Ask, EngineFaultError, RefusedError

log = logging.getLogger(__name__)

AT_ONCE = 4  # Examples of an adapter.
RETRY_S = 1.0  # What a caller is told to wait for an adapter that is not checked yet.


class Told(Protocol):
    def __call__(self, *, passed: bool) -> object: ...


class Replays:
    """What is known of adapters by their examples. `begin` looks; any thread may ask."""

    def __init__(
        self, config: ServerConfig, dtype: str, tokenizer: Tokenizer, vocab_size: int
    ) -> None:
        self._config, self._dtype = config, dtype
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._half = (config.running_requests_max + config.queue_requests_max) // 2
        self._at_once = min(AT_ONCE, self._half)
        self._found: dict[Resident, Replay] = {}
        self._strict = False  # In process nobody replays, so nobody waits for it.

    def ripe(self, resident: Resident) -> bool:
        """Whether nothing stands against serving it."""
        if not self._strict or not resident.card.golden:
            return True
        found = self._found.get(resident)
        return found is not None and found.passed

    def check(self, resident: Resident) -> None:
        """Refuse one that is not served now."""
        if self.ripe(resident):
            return
        found = self._found.get(resident)
        if found is None:
            raise RefusedError(
                "ADAPTER_UNUSABLE",
                f"adapter {resident.key!r} is being checked by its golden examples, as this server "
                "is strict; try again in a moment",
                "adapter",
                RETRY_S,
            )
        raise RefusedError(
            "ADAPTER_UNUSABLE",
            f"adapter {resident.key!r} does not say here what it said where it was learned: "
            f"{found.different} of its {found.checked} golden examples came out otherwise, and "
            "this server is strict; its operator's log says more",
            "adapter",
        )

    def begin(
        self, adapters: Adapters, admission: Admission, engine: Engine, told: Told
    ) -> Coroutine[Any, Any, None]:
        """What replays, for as long as it runs; from this call on a strict server refuses."""
        self._strict = self._config.golden == "strict"
        # Its own asks are for adapters that are not served yet.
        return self._run(adapters, replace(admission, check=lambda resident: None), engine, told)

    async def _run(
        self, adapters: Adapters, admission: Admission, engine: Engine, told: Told
    ) -> None:
        while self._config.golden != "ignore":
            there = adapters.all()
            for gone in self._found.keys() - set(there):
                del self._found[gone]
            fresh = [one for one in there if one.card.golden and one not in self._found]
            loop = asyncio.get_running_loop()
            weighed_at = loop.time()
            for resident in fresh:
                try:
                    found = await self._replay(resident, admission, engine)
                except Exception as error:
                    # The engine is away, or the file is: it is looked at again.
                    log.info(
                        "event=adapter_golden_put_off adapter=%s reason=%r", resident.key, error
                    )
                    continue
                self._found[resident] = found
                _tell(resident, found)
                told(passed=found.passed)
                if loop.time() - weighed_at > self._config.adapters_poll_s:
                    await self._weigh(adapters)
                    weighed_at = loop.time()
            if fresh:
                await self._weigh(adapters)
            await asyncio.sleep(self._config.adapters_poll_s)

    async def _weigh(self, adapters: Adapters) -> None:
        if self._strict:
            await asyncio.to_thread(adapters.weigh)

    async def _replay(self, resident: Resident, admission: Admission, engine: Engine) -> Replay:
        examples = resident.card.golden
        tolerance = tolerance_of(examples, self._dtype)
        outcomes: list[Outcome] = []
        for start in range(0, len(examples), self._at_once):
            await self._room(engine)
            some = examples[start : start + self._at_once]
            works = [self._outcome(resident, one, tolerance, admission, engine) for one in some]
            outcomes += await _all(works)
        return Replay(tuple(outcomes), tolerance)

    async def _room(self, engine: Engine) -> None:
        """Wait until half of what the engine takes is free: nobody is refused for an example."""
        while not engine.up or (engine.accepted and engine.accepted + self._at_once > self._half):
            await asyncio.sleep(self._config.adapters_poll_s)

    async def _outcome(
        self,
        resident: Resident,
        example: Golden,
        tolerance: float,
        admission: Admission,
        engine: Engine,
    ) -> Outcome:
        card = resident.card
        length = len(example.token_ids) or min(card.max_new_tokens or NEW_TOKENS, TOKENS_MAX)
        ask = Ask(
            dict(example.inputs),
            adapters=(resident.key,),
            max_new_tokens=length,
            temperature=0.0,
            seed=0,
            logprobs=min(2, self._config.logprobs_max),
            service="throughput",
            priority=-PRIORITY_MAX,
            tenant=resident.tenant,
        )
        whole = (card, self._tokenizer, example.inputs, self._vocab_size, 1 << 62)
        try:
            # In threads: a long text takes a while to tokenize.
            request = await asyncio.to_thread(admission.admit, ask)
            prompt = await asyncio.to_thread(golden_prompt, *whole)
            if request.answers[0].prompt != tuple(prompt):
                return Outcome("different", why="its prompt has no room here")
            (answer,) = await completions(engine.submit(request, whole=True))
            if answer.error is not None:
                raise answer.error
        except (RequestError, AdapterError, EngineFaultError) as error:
            return Outcome("different", why=f"it cannot be asked: {error}")
        return compare(example, answer.text, answer.token_ids, answer.scores, tolerance)


async def _all(works: Sequence[Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
    """What each came to; the first that fails ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


def _tell(resident: Resident, found: Replay) -> None:
    facts = (
        f"adapter={resident.key} tenant={resident.tenant} checked={found.checked} "
        f"different={found.different} ties={found.ties} worst_logprob={found.worst_logprob:.3g} "
        f"tolerance={found.tolerance:g}"
    )
    if found.passed:
        log.info("event=adapter_golden_passed %s", facts)
        return
    why = next(one.why for one in found.outcomes if one.result == "different")
    log.warning("event=adapter_golden_failed %s reason=%r", facts, why)
