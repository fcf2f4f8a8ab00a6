"""One document, many tasks: several adapters on one text are what each is alone, and cost less.

A service with its model in this process, from a checkpoint and a directory of adapters; the oracle
is the plain loop, and each task asked by itself.
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
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import Guide
from serving.request import Ask, DeadlinePassedError, UnknownAdapterError, seed_of
from serving.service.service import Service
from tests.support.many_tasks import TASKS, World
from tests.support.servers import eventually

DOCUMENT = "the quick brown fox jumps over the lazy dog and what is the sum of one and two "


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def shared(world: World) -> Iterator[Service]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = ServerConfig(
        str(world.checkpoint),
        adapters=str(world.adapters),
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
def service(shared: Service) -> Iterator[Service]:
    yield shared
    eventually(lambda: shared.engine.accepted == shared.engine.load.blocks_held == 0)


def test_each_task_answers_as_if_it_were_alone(service: Service, world: World) -> None:
    inputs = {"document": DOCUMENT, "question": "the answer is"}
    for temperature in (0.0, 2.0):
        own = {"task3": inputs}  # The only one that has a field for the question.
        asks = [
            Ask(own.get(task, {"document": DOCUMENT}), (task,), temperature=temperature, seed=4)
            for task in (*TASKS, "before")
        ]
        singly = [service.generate([ask])[0] for ask in asks]

        together = service.generate(
            [Ask(inputs, (*TASKS, "before"), temperature=temperature, seed=4)]
        )

        assert [one.index for one in together] == [0, 1, 2, 3, 4]
        assert [one.adapter for one in together] == [f"{task}@1" for task in (*TASKS, "before")]
        for mine, other in zip(together, singly, strict=True):
            assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
            assert (mine.virtual_tokens, mine.seed) == (other.virtual_tokens, 4)


def test_the_tasks_answers_are_the_plain_loops(service: Service, world: World) -> None:
    model = gpt.load(world.checkpoint, dtype="float64")
    ask = Ask({"document": DOCUMENT}, TASKS[:3], answers=2, temperature=2.0, seed=9)
    made = service.generate([ask])
    answers = service.admission.admit(ask).answers
    assert len(made) == len(answers) == 6
    for place, (completion, answer) in enumerate(zip(made, answers, strict=True)):
        assert answer.rows is not None
        table = open_adapter(Path(answer.rows.file)).table
        (alone,) = generate(model, [answer.prompt], answer.sampling, table=table)
        assert list(completion.token_ids) == alone.token_ids
        assert completion.seed == made[place % 2].seed
    assert made[0].seed == 9 != made[1].seed


def test_tasks_that_stand_behind_a_text_read_it_once(service: Service) -> None:
    text = f"{DOCUMENT} {time.monotonic_ns()} {DOCUMENT * 3}"
    before = service.engine.load

    made = service.generate([Ask({"document": text}, TASKS[:3])])

    length = made[0].prompt_tokens
    assert length > 80
    assert sum(one.cached_tokens for one in made) >= 2 * (length - 1)
    after = service.engine.load
    computed = after.prompt_tokens - before.prompt_tokens
    computed -= after.cached_tokens - before.cached_tokens
    assert computed <= 1.1 * length + sum(one.virtual_tokens for one in made)


def test_an_adapter_that_is_unloaded_finishes_what_it_began(service: Service, world: World) -> None:
    world.write("brief", 9, None)
    service.adapters.scan()
    (expected,) = service.generate([Ask(DOCUMENT, ("brief",), max_new_tokens=200)])

    async def work() -> None:
        stream = await service.start(Ask(DOCUMENT, ("brief",), max_new_tokens=200))
        first = await anext(stream)
        world.write("brief@2", 8, None)
        (world.adapters / "brief.safetensors").unlink()
        await asyncio.to_thread(service.adapters.scan)
        newer = await service.start(Ask(DOCUMENT, ("brief",), max_new_tokens=2))
        assert newer.request.answers[0].adapter == "brief@2"
        newer.close()
        (world.adapters / "brief@2.safetensors").unlink()
        with pytest.raises(UnknownAdapterError, match="brief@1"):
            await service.start(Ask(DOCUMENT, ("brief@1",)))
        rest = [token async for piece in stream for token in piece.token_ids]
        assert (*first.token_ids, *rest) == expected.token_ids

    asyncio.run(work())


def test_a_request_of_many_tasks_ends_as_a_whole_by_its_deadline(service: Service) -> None:
    async def work() -> None:
        ask = Ask({"document": DOCUMENT}, TASKS[:3], max_new_tokens=900)
        seen: set[int] = set()

        async def read(patience_s: float) -> None:
            async for piece in await service.start(ask, time.monotonic() + patience_s):
                seen.add(piece.index)

        for patience_s in (0.3, 0.6, 1.2):  # A busy machine needs longer for first tokens.
            seen.clear()
            with pytest.raises(DeadlinePassedError):
                await read(patience_s)
            if len(seen) == 3:
                break
        assert seen == {0, 1, 2}

    asyncio.run(work())


def test_a_bad_word_is_not_said_however_a_space_cuts_it(service: Service) -> None:
    free = service.generate([Ask("one", max_new_tokens=40, temperature=1.0, seed=1)])[0]
    word = max(free.text.split(), key=len)
    banned = service.generate(
        [Ask("one", max_new_tokens=40, temperature=1.0, seed=1, bad_words=(word,))]
    )[0]
    tokenizer = service.tokenizer
    runs = [tokenizer.encode(word), tokenizer.encode(word, started=True)]
    assert banned.token_ids != free.token_ids
    for run in runs:
        said = [list(banned.token_ids[at : at + len(run)]) for at in range(40)]
        assert run not in said


def test_the_rules_of_an_ask_are_those_of_its_answers(service: Service) -> None:
    ask = Ask((1,), typical_p=0.5, no_repeat_ngram_size=3, length_decay=(4, 1.5))
    rule = service.admission.admit(ask).answers[0].sampling
    assert (rule.typical_p, rule.no_repeat_ngram_size, rule.length_decay) == (0.5, 3, (4, 1.5))
    free, once = service.generate(
        [
            Ask("one", max_new_tokens=40, min_new_tokens=40, no_repeat_ngram_size=size)
            for size in (0, 1)
        ]
    )
    assert len(set(once.token_ids)) == 40 > len(set(free.token_ids))


def test_a_guide_is_followed(service: Service) -> None:
    guide = Guide("choice", '["yes", "no"]')
    (made,) = service.generate([Ask("is it so?", guide=guide, max_new_tokens=20)])
    assert made.text in ("yes", "no")
    assert made.finish == "stop"


MANY = 2**31
REFUSED = [
    (Ask(None), "prompt", "prompt is not set"),
    (Ask(()), "token_ids", "token_ids is empty"),
    (Ask(""), "text", "text is empty"),
    (Ask((640,)), "token_ids", "token_ids has 640; ids of this model are from 0 to 639"),
    (Ask((-1,)), "token_ids", "token_ids has -1"),
    (Ask((1,), max_new_tokens=MANY), "max_new_tokens", "ask for at most 1023 new tokens"),
    (Ask((1,) * 1025), "prompt", "memory holds of keys and values, 1024; shorten the prompt"),
    (Ask((1,) * 5000, max_new_tokens=1), "prompt", "shorten the prompt by 3977 tokens"),
    (Ask((1,), max_new_tokens=0), "max_new_tokens", "or ask for prompt_logprobs"),
    (Ask((1,), answers=0), "answers", "answers is 0"),
    (Ask((1,), answers=7), "answers", "at most 6"),
    (Ask((1,), TASKS[:2], answers=4), "answers", "2 adapters x 4 answers; at most 6"),
    (Ask((1,), logit_bias={1: 1.0, 2: 1.0, 3: 1.0}), "logit_bias", "has 3; at most 2"),
    (Ask((1,), logit_bias={640: 1.0}), "logit_bias", "has 640"),
    (Ask((1,), logit_bias={1: float("nan")}), "logit_bias", "-100 to 100"),
    (Ask((1,), allowed_token_ids=(1, 640)), "allowed_token_ids", "has 640"),
    (Ask((1,), bad_words=("",)), "bad_words", "one of 0 bytes"),
    (Ask((1,), bad_words=("x" * 300,)), "bad_words", "one of 300 bytes"),
    (Ask((1,), stop_token_ids=(640,)), "stops.token_ids", "has 640"),
    (Ask((1,), logprobs=21), "logprobs", "from 0 to 20"),
    (Ask((1,), prompt_logprobs=-1), "prompt_logprobs", "from 0 to 20"),
    (Ask((1,), min_new_tokens=9, max_new_tokens=8), "min_new_tokens", "at most max_new_tokens, 8"),
    (Ask((1,), repetition_penalty=0), "repetition_penalty", "from 0.01 to 10"),
    (Ask((1,), typical_p=0.0), "typical_p", r"in \(0, 1\]"),
    (Ask((1,), no_repeat_ngram_size=101), "no_repeat_ngram_size", r"from 0 \(off\) to 100"),
    (Ask((1,), length_decay=(0, 10.5)), "length_decay", "a factor from 1 to 10"),
    (Ask((1,), priority=101), "priority", "from -100 to 100"),
    (Ask((1,), tenant="x" * 257), "tenant", "257 bytes; at most 256"),
    (Ask((1,), tenant="\ud800"), "tenant", "lone surrogate"),
    (Ask((1,), service="fast"), "service", "latency, throughput"),  # type: ignore[arg-type]
    (Ask((1,), guide=Guide("json", "{")), "guide.json", "guide"),
    (Ask((1,), guide=Guide("regex", "x" * 70_000)), "guide.regex", "guide_bytes_max"),
    (Ask({"document": "a"}), "inputs", "no adapter is named"),
    (Ask({"document": "a"}, ("plain",)), "inputs", "no template"),
    (Ask({"documents": "a"}, TASKS), "inputs.documents", "did you mean 'document'"),
    (Ask({"document": "a"}, TASKS), "inputs.question", "is missing"),
    (Ask((1,), ("nobody",)), "adapter", "there is no adapter 'nobody'"),
]


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_what_cannot_be_is_refused_by_its_name(service: Service, place: int) -> None:
    ask, field, words = REFUSED[place]
    with pytest.raises(RequestError, match=words) as refused:
        service.generate([ask])
    assert refused.value.field == field


def test_a_length_that_nobody_asked_for_is_cut_to_what_there_is_room_for(service: Service) -> None:
    (made,) = service.generate([Ask((1,) * 1000)])
    assert (made.finish, len(made.token_ids)) == ("length", 24)
    answer = service.admission.admit(Ask((1,) * 1000)).answers[0]
    assert answer.sampling == Sampling(
        max_new_tokens=24, seed=answer.sampling.seed, stop_token_ids=service.tokenizer.stop_ids
    )


def test_the_example_of_a_program_says_what_it_promises(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert in_process.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert [line.partition(":")[0] for line in lines[2:]] == [
        *(f"seed {seed_of(7, place)}" for place in range(3)),
        "the prompt itself",
    ]
