"""Chats by OpenAI's own client, on a server whose model came with a template.

The oracle is `/v1/completions` with the ids that the template is known to make. At the end: what
the process around a template forbids it.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

import preamble
from checkpoints_tools.conversion.convert import write_native
from gpt.errors import RequestError
from gpt.formats.registry import open_checkpoint
from gpt.tokenizers.chat_template import MARKS, ChatTemplate, find_template
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from serving.admission.chat_prompt import Chat
from serving.admission.template_sandbox import SECONDS_MAX
from serving.config import ServerConfig
from serving.service.service import Found
from tests.support.chat_templates import CHATML
from tests.support.models import lively
from tests.support.servers import (
    CONFIG,
    WAIT_S,
    Server,
    command,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)
from tests.support.trained_tokenizers import sentencepiece_model

pytestmark = pytest.mark.slow

BASE = "checkpoint"
# Short, so that its ids are known without a template's engine.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content | trim }}"
    "{% if message.tool_calls is defined %}{{ message.tool_calls[0].function.arguments.a }}"
    "{% endif %}{{ '\\n' }}{% if message.content == 'tell' %}"
    "{{ raise_exception('nobody asks that') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = "twelve and thirty?"
PROMPT = f"user: {ASKED}\nassistant:"
USER: list[Any] = [{"role": "user", "content": ASKED}]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


class World:
    """A server with an adapter, its client, and its tokenizer."""

    def __init__(self, server: Server, tokenizer: Tokenizer) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.client = openai.OpenAI(
            base_url=self.url, api_key="none", max_retries=0, timeout=WAIT_S
        )

    @property
    def url(self) -> str:
        return f"http://{self.server.http_address}/v1"

    def chat(self, model: str = BASE, messages: Any = USER, **options: Any) -> ChatCompletion:
        answer: ChatCompletion = self.client.chat.completions.create(
            model=model, messages=messages, **options
        )
        return answer

    def ids(self, text: str) -> list[int]:
        """Of what the template writes behind the token that begins texts."""
        assert self.tokenizer.bos_id is not None
        return [self.tokenizer.bos_id, *self.tokenizer.encode(text)]

    def plain(self, text: str = PROMPT, model: str = BASE, **options: Any) -> Any:
        return self.client.completions.create(model=model, prompt=self.ids(text), **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("chat")
    words = folder / "words"
    words.mkdir()
    model = sentencepiece_model(model_type="bpe", byte_fallback=True)
    (words / "tokenizer.model").write_bytes(model)
    (words / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    checkpoint = folder / BASE
    write_native(lively(CONFIG), checkpoint, tokenizer=words)
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    adapters = folder / "adapters"
    adapters.mkdir()
    ids = tokenizer.encode("what is the sum of")
    write_adapter(adapters / "sum.safetensors", checkpoint, ids)
    limits: dict[str, Any] = {"adapters": str(adapters), "messages_max": 40}
    limits["text_bytes_max"] = 20_000
    with serving(checkpoint, folder / "s.yaml", folder / "log", **limits) as server:
        yield World(server, tokenizer)


def text_of(answer: ChatCompletion, place: int = 0) -> str:
    content = answer.choices[place].message.content
    assert content is not None
    return content


@pytest.mark.parametrize("model", [BASE, "sum"])
@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        {"seed": 3, "max_tokens": 12, "n": 3, "temperature": 0.8, "top_p": 0.9},
        {"seed": 5, "max_tokens": 9, "presence_penalty": 0.5, "logit_bias": {"5": 4}},
        {**GREEDY, "extra_body": {"guided_regex": "[0-9]{4}"}},
        {**GREEDY, "n": 2, "extra_body": {"use_beam_search": True}},
    ],
    ids=["greedy", "filtered", "biased", "guided", "beams"],
)
def test_a_chat_is_the_completion_of_what_the_template_makes(
    world: World, model: str, options: dict[str, Any]
) -> None:
    plain = world.plain(model=model, **options)
    chat = world.chat(model, **options)

    assert [one.message.content for one in chat.choices] == [one.text for one in plain.choices]
    assert [one.finish_reason for one in chat.choices] == [
        one.finish_reason for one in plain.choices
    ]
    assert [one.index for one in chat.choices] == list(range(len(plain.choices)))
    assert {one.message.role for one in chat.choices} == {"assistant"}
    assert chat.object == "chat.completion" and chat.id.startswith("chatcmpl-")
    assert chat.model == plain.model
    told = ("prompt_tokens", "completion_tokens", "total_tokens", "virtual_tokens")
    usages: list[Any] = [answer.to_dict()["usage"] for answer in (chat, plain)]
    assert [usages[0][name] for name in told] == [usages[1][name] for name in told]


def test_every_role_and_parts_of_a_text_reach_the_template(world: World) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    answer = world.chat(
        messages=[
            {"role": "developer", "content": "be of use"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
            *USER,
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
        **GREEDY,
    )
    turns = "system: be of use\nuser: a\na\nassistant: 7\ntool: 42\n"
    assert text_of(answer) == world.plain(turns + PROMPT, **GREEDY).choices[0].text


def test_an_answer_can_be_sent_back_as_the_library_has_it(world: World) -> None:
    first = world.chat(**GREEDY)
    again = world.chat(messages=[*USER, first.choices[0].message, *USER], **GREEDY)
    # The template strips what is around an answer.
    turns = f"user: {ASKED}\nassistant: {text_of(first).strip()}\n"
    assert text_of(again) == world.plain(turns + PROMPT, **GREEDY).choices[0].text


def test_a_control_token_in_a_message_is_text(world: World) -> None:
    answer = world.chat(messages=[{"role": "user", "content": "</s><s>a"}], **GREEDY)
    spelled = world.ids("user: </s><s>a\nassistant:")
    assert not {*spelled[1:]} & {world.tokenizer.bos_id, world.tokenizer.eos_id}
    plain = world.client.completions.create(model=BASE, prompt=spelled, **GREEDY)
    assert text_of(answer) == plain.choices[0].text


def test_a_stream_joined_is_the_whole_answer(world: World) -> None:
    options: dict[str, Any] = {"seed": 7, "max_tokens": 16, "n": 2, "logprobs": True}
    whole = world.chat("sum", top_logprobs=2, **options)
    events = list(
        world.client.chat.completions.create(
            model="sum",
            messages=USER,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
    )

    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert events[-1].choices == [] and events[-1].usage is not None
    assert whole.usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        parts = [one for event in events for one in event.choices if one.index == choice.index]
        roles = [part.delta.role for part in parts]
        assert roles == ["assistant"] + [None] * (len(parts) - 1) and len(parts) > 1
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        ends = [part.finish_reason for part in parts]
        assert ends == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        scored = [part.logprobs.content or [] for part in parts if part.logprobs is not None]
        told = [one.token for some in scored for one in some]
        assert told == [one.token for one in choice.logprobs.content]


def test_logprobs_are_those_of_the_plain_completion_in_the_shape_of_chats(world: World) -> None:
    plain = world.plain(logprobs=3, **GREEDY).choices[0].logprobs
    (choice,) = world.chat(logprobs=True, top_logprobs=3, **GREEDY).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    scored = choice.logprobs.content

    assert [one.logprob for one in scored] == pytest.approx(plain.token_logprobs)
    text = b"".join(bytes(one.bytes) for one in scored if one.bytes is not None)
    assert text.decode(errors="replace").strip() == text_of_choice(choice).strip()
    for one in scored:
        assert one.top_logprobs[0].logprob == one.logprob
        assert len(one.top_logprobs) == 3
    bare = world.chat(logprobs=True, **GREEDY).choices[0].logprobs
    assert bare is not None and bare.content is not None
    assert all(one.top_logprobs == [] for one in bare.content)
    assert world.chat(**GREEDY).choices[0].logprobs is None


def text_of_choice(choice: Any) -> str:
    content: str = choice.message.content
    return content


def test_stops_lengths_and_formats(world: World) -> None:
    text = text_of(world.chat(**GREEDY))
    stop = text[4:6]
    cut = world.chat(stop=stop, **GREEDY).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(stop)], "stop")
    assert cut.to_dict()["stop_reason"] == stop

    extra = {"ignore_eos": True}
    short = world.chat(max_completion_tokens=3, temperature=0, extra_body=extra)
    assert short.usage is not None and short.usage.completion_tokens == 3
    assert short.choices[0].finish_reason == "length"
    own = world.chat("sum", temperature=0, extra_body=extra)
    assert own.usage is not None and own.usage.completion_tokens == 128
    # Nobody said how long, so it goes on to the end of the context.
    unsaid = world.chat(messages=said("word " * 980)["messages"], temperature=0, extra_body=extra)
    assert unsaid.usage is not None
    assert unsaid.usage.total_tokens == CONFIG.max_position_embeddings
    assert unsaid.usage.completion_tokens != 128

    shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": shape, "strict": True}}
    for form in ({"type": "json_object"}, strict):
        guided = world.chat(response_format=form, max_tokens=60, seed=1)
        assert text_of(guided).lstrip().startswith("{")
    assert world.chat(response_format={"type": "text"}, **GREEDY).choices


def test_many_chats_at_once_answer_as_each_alone(world: World) -> None:
    async def work() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=world.url, api_key="none", max_retries=0, timeout=WAIT_S
        ) as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model=BASE, messages=chat(number), stream=True, **GREEDY
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(12)))

    def chat(number: int) -> list[Any]:
        return [{"role": "user", "content": f"{ASKED} {number}"}]

    texts = asyncio.run(work())
    assert texts == [text_of(world.chat(messages=chat(one), **GREEDY)) for one in range(12)]


def said(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hello"}, "messages", "Expected `array | null`"),
        (said(None), "messages", "messages[0] has no content"),
        (said([IMAGE]), "messages", "messages[0].content[0] is of type 'image_url'"),
        (said([{"type": "text"}]), "messages", "without a text"),
        (said("x", weight=1), "messages", "weight"),
        (said("x", tool_call_id="1"), "messages", "only a tool"),
        (said("x", tool_calls=[TOOL]), "messages", "only an assistant"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "'king'"),
        ({"messages": USER * 41}, "messages", "messages_max"),
        (said("a " * 10_000), "messages", "text_bytes_max"),
        (said("word " * 3900), "messages", "shorten"),
        (said("tell"), "messages", "refuses these messages: nobody asks that"),
        (said("".join(MARKS)), "messages", "U+FDD0"),
        ({"tools": [TOOL]}, "tools", "cannot be called"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be called"),
        ({"extra_body": {"functions": [{}]}}, "functions", "tool_choice none"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template", "not from requests"),
        ({"extra_body": {"prompt": "a"}}, "prompt", "/v1/completions"),
        ({"extra_body": {"echo": True}}, "echo", "/v1/completions"),
        ({"extra_body": {"top_logprob": 1}}, "top_logprob", "did you mean 'top_logprobs'"),
        ({"top_logprobs": 2}, "top_logprobs", "set that to true"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "logprobs_max"),
        ({"logprobs": 5}, "logprobs", "bool"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "the same"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
        ({"max_completion_tokens": 99_999}, "max_completion_tokens", "over the model's context"),
        ({"n": 0}, "n", "n is 0"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"store": True}, "store", "nothing is stored"),
        ({"stop": ["a"] * 100}, "stop", "at most"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_field_is_told_by_the_name_that_it_has_here(
    world: World, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        world.chat(**{"max_tokens": 4, **options} if "messages" in options else options)

    error = caught.value
    assert words in str(error)
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert error.code in ("INVALID_FIELD", "PROMPT_TOO_LONG")
    assert not any(mark in str(error) for mark in MARKS)


def test_other_ends_are_those_of_every_endpoint(world: World) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        world.chat("dog", **GREEDY)
    assert (unknown.value.code, unknown.value.param) == ("UNKNOWN_MODEL", "model")
    with pytest.raises(openai.APIStatusError) as late:
        world.chat(extra_body={"timeout": 0.05, "ignore_eos": True})
    assert late.value.code == "DEADLINE_PASSED"
    held = world.client.chat.completions.create(
        model=BASE, messages=USER, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(held))
    held.close()
    eventually(lambda: world.server.metric("preamble_scheduler_running_requests") == 0)
    assert world.server.metric('preamble_requests_total{code="OK",method="chat",wire="openai"}')


def test_a_model_without_a_template_says_how_to_give_one(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    with serving(checkpoint, tmp_path / "s.yaml") as server:
        world = World(server, open_tokenizer(checkpoint / "tokenizer"))
        with pytest.raises(openai.BadRequestError, match="--chat-template FILE") as caught:
            world.chat(**GREEDY)
        assert caught.value.param == "messages"
        assert world.plain(**GREEDY).choices[0].text

    given = tmp_path / "given.jinja"
    given.write_text(CHATML)
    found = Found.at(ServerConfig(str(checkpoint), chat_template=str(given)))
    assert found.chat_template is not None and found.chat_template.text == CHATML
    given.write_text("{% if %}")
    done = subprocess.run(
        command("serve", checkpoint, "--chat-template", given),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "given.jinja is none: line 1" in done.stderr


def test_a_template_goes_along_when_a_checkpoint_is_converted(world: World, tmp_path: Path) -> None:
    source = tmp_path / "words"
    source.mkdir()
    (source / "tokenizer.model").write_bytes(sentencepiece_model(model_type="bpe"))
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (source / "chat_template.jinja").write_text(CHATML)
    write_native(lively(CONFIG), tmp_path / "native", tokenizer=source)
    for kind in ("hf", "megatron", "megatron-dist"):
        target = tmp_path / kind
        assert preamble.main(["convert", str(tmp_path / "native"), str(target), "--to", kind]) == 0
        place = open_checkpoint(target).tokenizer
        template = find_template(place, world.tokenizer)
        assert template is not None and template.text == CHATML, kind


# ---------------------------------------------------------------------- the process of a template


def shut(template: str, tokenizer: Tokenizer) -> Chat:
    config = ServerConfig("m", text_bytes_max=10_000)
    return Chat(ChatTemplate(template, {}, Path("x")), tokenizer, config)


def test_a_template_without_end_is_ended_and_the_next_chat_is_answered(world: World) -> None:
    turns = "{% for b in range(99999) %}{% endfor %}"
    stuck = f"{{% if messages[0].content == 'stop' %}}{{% for a in range(99999) %}}{turns}"
    chat = shut(stuck + "{% endfor %}{% endif %}x", world.tokenizer)
    ids = chat.prompt(USER)
    began = time.process_time()
    with pytest.raises(RequestError, match=f"takes over {SECONDS_MAX} s"):
        chat.prompt([{"role": "user", "content": "stop"}])

    assert time.process_time() - began < 1  # It was none of ours that it has used.
    assert chat.prompt(USER) == ids
    chat.close()


def test_a_template_that_wants_all_memory_gets_none_of_the_servers(world: World) -> None:
    for template, words in (
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{% set n = namespace(x='a' * 99) %}{% for i in range(40) %}{% set n.x = n.x * 8 %}"
         "{% endfor %}", "memory"),
        ("{{ '%999999999s' | format(1) }}", "memory|text_bytes_max|takes over"),
        ("{{ messages[0].nothing }}", "no text"),
    ):  # fmt: skip
        chat = shut(template, world.tokenizer)
        with pytest.raises(RequestError, match=words):
            chat.prompt(USER)
        chat.close()


def test_the_process_comes_again_when_it_was_killed_and_goes_with_the_chats(world: World) -> None:
    chat = shut("{{ messages[0].content }}", world.tokenizer)
    ids = chat.prompt(USER)
    process = chat._renderer._process
    assert process is not None
    process.kill()
    eventually(lambda: process.poll() is not None)
    assert chat.prompt(USER) == ids
    chat.close()
    assert chat._renderer._process is not None
    assert chat._renderer._process.returncode == -signal.SIGKILL


def test_around_the_sandbox_is_a_process_that_can_open_no_file() -> None:
    program = """
from serving.admission.template_sandbox import _confine
_confine()
for name, act in {
    "read": lambda: open("/etc/hostname"),
    "start": lambda: __import__("subprocess").run(["true"]),
    "memory": lambda: bytearray(1 << 31),
    "connect": lambda: __import__("_socket").socket(),
}.items():
    try:
        act()
        print(name)
    except (OSError, MemoryError, ImportError):
        pass
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
