"""Golden-example checks: replay the golden examples of adapters on the running engine.

Golden examples are inputs in an adapter's card, with the completions that they gave after training.
A background task checks each adapter once: at the server's start, or when the adapter is new. The
examples run as requests of the lowest priority, a few at a time, and only while the engine has
spare capacity. The verdicts go to the log and the metrics. With `golden: strict`, an adapter that
has examples is served only after all its examples have passed. If no version of a name has been
promoted, the newest version that may be served is preferred as the current version.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gpt.adapters.card import GoldenExample
from gpt.adapters.golden_examples import (
    GOLDEN_TOKENS_MAX,
    ExampleReplay,
    GoldenReplay,
    compare_example,
    golden_tolerance,
    render_golden_prompt,
)
from gpt.errors import AdapterError, RequestError
from gpt.generation.completions import NEW_TOKENS_DEFAULT
from gpt.tokenizers.tokenizer import Tokenizer
from serving.adapters.directory_scan import LoadedAdapter
from serving.adapters.registry import AdapterRegistry
from serving.admission.admission import PRIORITY_MAX, Admission
from serving.config import AdapterConfig, LimitsConfig, SchedulerConfig
from serving.engine.engine import Engine
from serving.engine.stream import collect_completions
from serving.request import Ask, EngineFaultError, RefusedError

log = logging.getLogger(__name__)

EXAMPLES_IN_PARALLEL = 4  # Maximum number of an adapter's examples that run at once.
RETRY_S = 1.0  # Retry delay sent to callers of an adapter that is not checked yet.


class OnChecked(Protocol):
    def __call__(self, *, passed: bool) -> object: ...


class GoldenChecker:
    """Checks golden examples, and records a verdict per adapter.

    Any thread may read the verdicts.
    """

    def __init__(
        self,
        adapter_config: AdapterConfig,
        limits_config: LimitsConfig,
        scheduler_config: SchedulerConfig,
        dtype: str,
        tokenizer: Tokenizer,
        vocab_size: int,
    ) -> None:
        self._adapter_config = adapter_config
        self._limits_config = limits_config
        self._dtype = dtype
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        capacity = scheduler_config.running_requests_max + scheduler_config.queue_requests_max
        self._half_capacity = capacity // 2
        self._parallel = min(EXAMPLES_IN_PARALLEL, self._half_capacity)
        self._replays: dict[LoadedAdapter, GoldenReplay] = {}
        # Set by `start`. Before `start` no check runs, so strict mode would refuse every adapter
        # with examples.
        self._strict = False

    def is_eligible(self, adapter: LoadedAdapter) -> bool:
        """Return whether the adapter may be served now.

        This is the case if the mode is not strict, if the adapter has no examples, or if all its
        examples passed.
        """
        if not self._strict or not adapter.card.golden:
            return True
        replay = self._replays.get(adapter)
        return replay is not None and replay.passed

    def check_servable(self, adapter: LoadedAdapter) -> None:
        """Raise `RefusedError` if the adapter may not be served now."""
        if self.is_eligible(adapter):
            return
        replay = self._replays.get(adapter)
        if replay is None:
            raise RefusedError(
                "ADAPTER_UNUSABLE",
                f"adapter {adapter.key!r} waits for the check of its golden examples "
                "(golden: strict); try again in a moment",
                "adapter",
                RETRY_S,
            )
        raise RefusedError(
            "ADAPTER_UNUSABLE",
            f"adapter {adapter.key!r} failed {replay.different} of {replay.checked} golden "
            "examples on this model (golden: strict); see the server log",
            "adapter",
        )

    def start(
        self, registry: AdapterRegistry, admission: Admission, engine: Engine, on_checked: OnChecked
    ) -> Coroutine[Any, Any, None]:
        """Return the coroutine that runs the checks.

        From this call on, `golden: strict` is in effect. `on_checked` is called after the check of
        each adapter.
        """
        self._strict = self._adapter_config.golden == "strict"
        # The checker's requests must pass admission although the adapter is not served yet.
        return self._run(
            registry, replace(admission, check_servable=lambda adapter: None), engine, on_checked
        )

    async def _run(
        self, registry: AdapterRegistry, admission: Admission, engine: Engine, on_checked: OnChecked
    ) -> None:
        while self._adapter_config.golden != "ignore":
            adapters = registry.all_adapters()
            for removed_adapter in self._replays.keys() - set(adapters):
                del self._replays[removed_adapter]
            unchecked = [
                candidate
                for candidate in adapters
                if candidate.card.golden and candidate not in self._replays
            ]
            loop = asyncio.get_running_loop()
            selected_at = loop.time()
            for adapter in unchecked:
                try:
                    replay = await self._replay_adapter(adapter, admission, engine)
                except Exception as error:
                    # For example, the engine or the adapter file is unavailable. The next
                    # iteration of the outer loop tries again.
                    log.info(
                        "event=adapter_golden_put_off adapter=%s reason=%r", adapter.key, error
                    )
                    continue
                self._replays[adapter] = replay
                _log_replay(adapter, replay)
                on_checked(passed=replay.passed)
                if loop.time() - selected_at > self._adapter_config.adapters_poll_s:
                    await self._reselect_current(registry)
                    selected_at = loop.time()
            if unchecked:
                await self._reselect_current(registry)
            await asyncio.sleep(self._adapter_config.adapters_poll_s)

    async def _reselect_current(self, registry: AdapterRegistry) -> None:
        if self._strict:
            await asyncio.to_thread(registry.reselect_current)

    async def _replay_adapter(
        self, adapter: LoadedAdapter, admission: Admission, engine: Engine
    ) -> GoldenReplay:
        examples = adapter.card.golden
        tolerance = golden_tolerance(examples, self._dtype)
        outcomes: list[ExampleReplay] = []
        for start in range(0, len(examples), self._parallel):
            await self._wait_for_capacity(engine)
            batch = examples[start : start + self._parallel]
            replays = [
                self._replay_example(adapter, example, tolerance, admission, engine)
                for example in batch
            ]
            outcomes += await _gather(replays)
        return GoldenReplay(tuple(outcomes), tolerance)

    async def _wait_for_capacity(self, engine: Engine) -> None:
        """Wait until the engine is up, and is idle or has spare capacity.

        The engine has spare capacity if its unfinished sequences and the examples together are at
        most half of its capacity. The second half remains for callers.
        """
        while not engine.up or (
            engine.unfinished_sequences
            and engine.unfinished_sequences + self._parallel > self._half_capacity
        ):
            await asyncio.sleep(self._adapter_config.adapters_poll_s)

    async def _replay_example(
        self,
        adapter: LoadedAdapter,
        example: GoldenExample,
        tolerance: float,
        admission: Admission,
        engine: Engine,
    ) -> ExampleReplay:
        card = adapter.card
        new_tokens = len(example.token_ids) or min(
            card.max_new_tokens or NEW_TOKENS_DEFAULT, GOLDEN_TOKENS_MAX
        )
        ask = Ask(
            dict(example.inputs),
            adapters=(adapter.key,),
            max_new_tokens=new_tokens,
            temperature=0.0,
            seed=0,
            logprobs=min(2, self._limits_config.logprobs_max),
            service="throughput",
            priority=-PRIORITY_MAX,
            tenant=adapter.tenant,
        )
        no_limit = 1 << 62
        prompt_args = (card, self._tokenizer, example.inputs, self._vocab_size, no_limit)
        try:
            # In threads, since tokenizing a long text would block the event loop.
            request = await asyncio.to_thread(admission.admit, ask)
            full_prompt = await asyncio.to_thread(render_golden_prompt, *prompt_args)
            # Admission truncates a prompt that does not fit the context, so that the request's
            # prompt differs from the full prompt.
            if request.answers[0].prompt != tuple(full_prompt):
                return ExampleReplay("different", reason="its prompt does not fit the context")
            (completion,) = await collect_completions(engine.submit(request, final_only=True))
            if completion.error is not None:
                raise completion.error
        except (RequestError, AdapterError, EngineFaultError) as error:
            return ExampleReplay("different", reason=f"its request failed: {error}")
        return compare_example(
            example, completion.text, completion.token_ids, completion.scores, tolerance
        )


async def _gather(coroutines: Sequence[Coroutine[Any, Any, ExampleReplay]]) -> list[ExampleReplay]:
    """Run the coroutines and return their results in order.

    If a coroutine raises, the unfinished coroutines are cancelled.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


def _log_replay(adapter: LoadedAdapter, replay: GoldenReplay) -> None:
    fields = (
        f"adapter={adapter.key} tenant={adapter.tenant} checked={replay.checked} "
        f"different={replay.different} ties={replay.ties} "
        f"worst_logprob={replay.logprob_difference_max:.3g} tolerance={replay.tolerance:g}"
    )
    if replay.passed:
        log.info("event=adapter_golden_passed %s", fields)
        return
    reason = next(outcome.reason for outcome in replay.examples if outcome.verdict == "different")
    log.warning("event=adapter_golden_failed %s reason=%r", fields, reason)
