"""Many tasks on one document: each adapter answers as if alone, with one shared prefill.

The service has its model in this process, from a checkpoint and an adapter directory; the
references are the generation loop and each task requested alone.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gpt
import serving
from examples import in_process
from gpt.adapters.adapter_file import open_adapter
from gpt.errors import RequestError
from gpt.generation.generate import generate
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import Guide
from serving.request import Ask, DeadlinePassedError, UnknownAdapterError, answer_seed
from serving.service.service import Service
from tests.support.many_tasks import TASKS, TaskAdapters
from tests.support.recording_receiver import gate_updates
from tests.support.servers import eventually

DOCUMENT = "the quick brown fox jumps over the lazy dog and what is the sum of one and two "


@pytest.fixture(scope="module")
def task_adapters(tmp_path_factory: pytest.TempPathFactory) -> TaskAdapters:
    return TaskAdapters(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def shared_service(task_adapters: TaskAdapters) -> Iterator[Service]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = ServerConfig(
        str(task_adapters.checkpoint),
        adapters=str(task_adapters.adapters),
        dtype="float64",
        step_tokens_max=64,
        kv_tokens_max=1024,
        adapter_rows_max=64,
        answers_max=6,
        bias_max=2,
    )
    with serving.open_engine(config) as service:
        yield service
    torch.set_num_threads(threads)


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    yield shared_service
    eventually(
        lambda: (
            shared_service.engine.unfinished_sequences
            == shared_service.engine.stats.blocks_held
            == 0
        )
    )


def test_each_task_answers_as_if_alone(service: Service, task_adapters: TaskAdapters) -> None:
    inputs = {"document": DOCUMENT, "question": "the answer is"}
    tasks = (*TASKS, "before")
    for temperature in (0.0, 2.0):
        # Only the template of task3 has a field for the question.
        inputs_of_task = {"task3": inputs}
        asks = [
            Ask(
                inputs_of_task.get(task, {"document": DOCUMENT}),
                (task,),
                temperature=temperature,
                seed=4,
            )
            for task in tasks
        ]
        separate = [service.generate([ask])[0] for ask in asks]

        together = service.generate([Ask(inputs, tasks, temperature=temperature, seed=4)])

        assert [completion.index for completion in together] == [0, 1, 2, 3, 4]
        assert [completion.adapter for completion in together] == [f"{task}@1" for task in tasks]
        for completion, alone in zip(together, separate, strict=True):
            assert (completion.token_ids, completion.text) == (alone.token_ids, alone.text)
            assert (completion.virtual_tokens, completion.seed) == (alone.virtual_tokens, 4)


def test_task_answers_match_the_reference_loop(
    service: Service, task_adapters: TaskAdapters
) -> None:
    model = gpt.load(task_adapters.checkpoint, dtype="float64")
    ask = Ask({"document": DOCUMENT}, TASKS[:3], answers=2, temperature=2.0, seed=9)
    completions = service.generate([ask])
    answers = service.admission.admit(ask).answers
    assert len(completions) == len(answers) == 6
    for index, (completion, answer) in enumerate(zip(completions, answers, strict=True)):
        assert answer.adapter_ref is not None
        table = open_adapter(Path(answer.adapter_ref.file)).table
        (alone,) = generate(model, [answer.prompt], answer.sampling, adapter_table=table)
        assert list(completion.token_ids) == alone.token_ids
        assert completion.seed == completions[index % 2].seed
    assert completions[0].seed == 9 != completions[1].seed


def test_tasks_with_the_same_leading_text_prefill_it_once(service: Service) -> None:
    text = f"{DOCUMENT} {time.monotonic_ns()} {DOCUMENT * 3}"
    before = service.engine.stats

    completions = service.generate([Ask({"document": text}, TASKS[:3])])

    length = completions[0].prompt_tokens
    assert length > 80
    assert sum(completion.cached_tokens for completion in completions) >= 2 * (length - 1)
    after = service.engine.stats
    computed = after.prompt_tokens - before.prompt_tokens
    computed -= after.cached_tokens - before.cached_tokens
    assert computed <= 1.1 * length + sum(completion.virtual_tokens for completion in completions)


def test_an_unloaded_adapter_finishes_its_running_requests(
    service: Service, task_adapters: TaskAdapters
) -> None:
    task_adapters.write("brief", 9, None)
    service.adapters.scan()
    (expected,) = service.generate([Ask(DOCUMENT, ("brief",), max_new_tokens=200)])

    async def work() -> None:
        stream = await service.start(Ask(DOCUMENT, ("brief",), max_new_tokens=200))
        first = await anext(stream)
        task_adapters.write("brief@2", 8, None)
        (task_adapters.adapters / "brief.safetensors").unlink()
        await asyncio.to_thread(service.adapters.scan)
        newer = await service.start(Ask(DOCUMENT, ("brief",), max_new_tokens=2))
        assert newer.request.answers[0].adapter == "brief@2"
        newer.close()
        (task_adapters.adapters / "brief@2.safetensors").unlink()
        with pytest.raises(UnknownAdapterError, match="brief@1"):
            await service.start(Ask(DOCUMENT, ("brief@1",)))
        rest = [token async for piece in stream for token in piece.token_ids]
        assert (*first.token_ids, *rest) == expected.token_ids

    asyncio.run(work())


def test_a_deadline_ends_all_tasks_of_a_request(service: Service) -> None:
    async def work() -> None:
        ask = Ask({"document": DOCUMENT}, TASKS[:3], max_new_tokens=900)
        answered: set[int] = set()

        async def read_until(timeout_s: float) -> None:
            async for piece in await service.start(ask, time.monotonic() + timeout_s):
                answered.add(piece.index)

        for timeout_s in (0.5, 2, 8, 32):  # A loaded machine needs more time for the first tokens.
            answered.clear()
            # Enough steps to begin, too few to finish.
            with gate_updates(service.engine, 30), pytest.raises(DeadlinePassedError):
                await read_until(timeout_s)
            if len(answered) == 3:
                break
        assert answered == {0, 1, 2}

    asyncio.run(work())


def test_a_bad_word_is_banned_with_and_without_a_leading_space(service: Service) -> None:
    unrestricted = service.generate([Ask("one", max_new_tokens=40, temperature=1.0, seed=1)])[0]
    word = max(unrestricted.text.split(), key=len)
    banned = service.generate(
        [Ask("one", max_new_tokens=40, temperature=1.0, seed=1, bad_words=(word,))]
    )[0]
    tokenizer = service.tokenizer
    runs = [tokenizer.encode(word), tokenizer.encode(word, continues_text=True)]
    assert banned.token_ids != unrestricted.token_ids
    for run in runs:
        subsequences = [list(banned.token_ids[start : start + len(run)]) for start in range(40)]
        assert run not in subsequences


def test_sampling_fields_of_an_ask_reach_its_answers(service: Service) -> None:
    ask = Ask((1,), typical_p=0.5, no_repeat_ngram_size=3, length_decay=(4, 1.5))
    sampling = service.admission.admit(ask).answers[0].sampling
    assert (sampling.typical_p, sampling.no_repeat_ngram_size, sampling.length_decay) == (
        0.5,
        3,
        (4, 1.5),
    )
    repeating, unrepeated = service.generate(
        [
            Ask("one", max_new_tokens=40, min_new_tokens=40, no_repeat_ngram_size=size)
            for size in (0, 1)
        ]
    )
    assert len(set(unrepeated.token_ids)) == 40 > len(set(repeating.token_ids))


def test_a_guide_constrains_the_output(service: Service) -> None:
    guide = Guide("choice", '["yes", "no"]')
    (completion,) = service.generate([Ask("is it so?", guide=guide, max_new_tokens=20)])
    assert completion.text in ("yes", "no")
    assert completion.finish == "stop"


TOO_MANY = 2**31
REFUSED = [
    (Ask(None), "prompt", "prompt is not set"),
    (Ask(()), "token_ids", "token_ids is empty"),
    (Ask(""), "text", "text is empty"),
    (Ask((640,)), "token_ids", "token_ids has 640; token ids of this model are 0 to 639"),
    (Ask((-1,)), "token_ids", "token_ids has -1"),
    (Ask((1,), max_new_tokens=TOO_MANY), "max_new_tokens", "ask for at most 1023 new tokens"),
    (Ask((1,) * 1025), "prompt", "KV cache of 1024 tokens; shorten the prompt by 129"),
    (Ask((1,) * 5000, max_new_tokens=1), "prompt", "shorten the prompt by 3977 tokens"),
    (Ask((1,), max_new_tokens=0), "max_new_tokens", "or set prompt_logprobs"),
    (Ask((1,), answers=0), "answers", "answers is 0"),
    (Ask((1,), answers=7), "answers", "at most 6"),
    (
        Ask((1,), TASKS[:2], answers=4),
        "answers",
        "answers is 4 for each of 2 adapters; a request may have at most 6",
    ),
    (
        Ask((1,), logit_bias={1: 1.0, 2: 1.0, 3: 1.0}),
        "logit_bias",
        "has 3 entries; it may have at most 2",
    ),
    (Ask((1,), logit_bias={640: 1.0}), "logit_bias", "has 640"),
    (Ask((1,), logit_bias={1: float("nan")}), "logit_bias", "-100 to 100"),
    (Ask((1,), allowed_token_ids=(1, 640)), "allowed_token_ids", "has 640"),
    (Ask((1,), bad_words=("",)), "bad_words", "an entry of 0 bytes"),
    (Ask((1,), bad_words=("x" * 300,)), "bad_words", "an entry of 300 bytes"),
    (Ask((1,), stop_token_ids=(640,)), "stops.token_ids", "has 640"),
    (Ask((1,), logprobs=21), "logprobs", "from 0 to 20"),
    (Ask((1,), prompt_logprobs=-1), "prompt_logprobs", "from 0 to 20"),
    (Ask((1,), min_new_tokens=9, max_new_tokens=8), "min_new_tokens", "at most max_new_tokens, 8"),
    (Ask((1,), repetition_penalty=0), "repetition_penalty", "from 0.01 to 10"),
    (Ask((1,), typical_p=0.0), "typical_p", r"in \(0, 1\]"),
    (Ask((1,), no_repeat_ngram_size=101), "no_repeat_ngram_size", r"from 0 \(off\) to 100"),
    (Ask((1,), length_decay=(0, 10.5)), "length_decay", "a factor from 1 to 10"),
    (Ask((1,), priority=101), "priority", "from -100 to 100"),
    (Ask((1,), tenant="x" * 257), "tenant", "257 bytes; it may be at most 256"),
    (Ask((1,), tenant="\ud800"), "tenant", "lone surrogate"),
    (Ask((1,), service="fast"), "service", "latency, throughput"),  # type: ignore[arg-type]
    (Ask((1,), guide=Guide("json", "{")), "guide.json", "guide"),
    (Ask((1,), guide=Guide("regex", "x" * 70_000)), "guide.regex", "guide_bytes_max"),
    (Ask({"document": "a"}), "inputs", "the request names no adapter"),
    (Ask({"document": "a"}, ("plain",)), "inputs", "no template"),
    (Ask({"documents": "a"}, TASKS), "inputs.documents", "did you mean 'document'"),
    (Ask({"document": "a"}, TASKS), "inputs.question", "is missing"),
    (Ask((1,), ("nobody",)), "adapter", "adapter 'nobody' does not exist"),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_invalid_fields_are_refused_by_name(service: Service, index: int) -> None:
    ask, field, message = REFUSED[index]
    with pytest.raises(RequestError, match=message) as raised:
        service.generate([ask])
    assert raised.value.field == field


def test_a_default_length_is_reduced_to_the_free_context(service: Service) -> None:
    (completion,) = service.generate([Ask((1,) * 1000)])
    assert (completion.finish, len(completion.token_ids)) == ("length", 24)
    answer = service.admission.admit(Ask((1,) * 1000)).answers[0]
    assert answer.sampling == SamplingParams(
        max_new_tokens=24, seed=answer.sampling.seed, stop_token_ids=service.tokenizer.stop_ids
    )


def test_the_in_process_example_prints_its_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert in_process.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert [line.partition(":")[0] for line in lines[2:]] == [
        *(f"seed {answer_seed(7, index)}" for index in range(3)),
        "the prompt",
    ]
