"""OpenAI chat completions, by OpenAI's client, on a model with a chat template.

The oracle is `/v1/completions` with the token ids that the template renders to. The last tests are
about the template's process.
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
from gpt.tokenizers.chat_template import ESCAPE_MARKS, ChatTemplate, find_template
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from serving.admission.chat_prompt import ChatPromptRenderer
from serving.admission.template_sandbox import SECONDS_MAX
from serving.config import ServerConfig
from serving.service.service import ServableCheckpoint
from tests.support.chat_server import (
    BASE,
    PROMPT,
    USER,
    ChatServer,
    tool,
    write_chat_checkpoint,
)
from tests.support.chat_templates import CHATML
from tests.support.models import lively
from tests.support.servers import (
    CONFIG,
    WAIT_S,
    command,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)
from tests.support.trained_tokenizers import sentencepiece_model

pytestmark = pytest.mark.slow

# Short, so that its ids are known without a template engine.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}"
    "{% if message.name is defined %} {{ message.name }}{% endif %}: {{ message.content | trim }}"
    "{% if message.reasoning_content is defined %} ({{ message.reasoning_content }}){% endif %}"
    "{% if message.tool_calls is defined %}{{ message.tool_calls[0].function.arguments.a }}"
    "{% endif %}{{ '\\n' }}{% if message.content == 'tell' %}"
    "{{ raise_exception('nobody asks that') }}{% endif %}{% endfor %}"
    "{% if mood is defined %}{{ mood }} {% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTION = USER[0]["content"]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    folder = tmp_path_factory.mktemp("chat")
    checkpoint = write_chat_checkpoint(folder, TEMPLATE)
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    adapters = folder / "adapters"
    adapters.mkdir()
    ids = tokenizer.encode("what is the sum of")
    write_adapter(adapters / "sum.safetensors", checkpoint, ids)
    limits: dict[str, Any] = {"adapters": str(adapters), "messages_max": 40}
    limits["text_bytes_max"] = 20_000
    limits["tools_max"] = 8
    with serving(checkpoint, folder / "s.yaml", folder / "log", **limits) as server:
        yield ChatServer(server, tokenizer)


def text_of(completion: ChatCompletion, index: int = 0) -> str:
    content = completion.choices[index].message.content
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
def test_chats_equal_the_completion_of_the_rendered_template(
    deployment: ChatServer, model: str, options: dict[str, Any]
) -> None:
    completion = deployment.plain(model=model, **options)
    chat = deployment.chat(model, **options)

    assert [choice.message.content for choice in chat.choices] == [
        choice.text for choice in completion.choices
    ]
    assert [choice.finish_reason for choice in chat.choices] == [
        choice.finish_reason for choice in completion.choices
    ]
    assert [choice.index for choice in chat.choices] == list(range(len(completion.choices)))
    assert {choice.message.role for choice in chat.choices} == {"assistant"}
    assert chat.object == "chat.completion" and chat.id.startswith("chatcmpl-")
    assert chat.model == completion.model
    usage_fields = ("prompt_tokens", "completion_tokens", "total_tokens", "virtual_tokens")
    usages: list[Any] = [response.to_dict()["usage"] for response in (chat, completion)]
    assert [usages[0][name] for name in usage_fields] == [usages[1][name] for name in usage_fields]


def test_all_roles_and_text_parts_reach_the_template(deployment: ChatServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    chat = deployment.chat(
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
    turns = "system: be of use\nuser ann: a\na\nassistant: 7\ntool: 42\n"
    assert text_of(chat) == deployment.plain(turns + PROMPT, **GREEDY).choices[0].text


def test_answers_can_be_sent_back_as_messages(deployment: ChatServer) -> None:
    first_chat = deployment.chat(**GREEDY)
    second_chat = deployment.chat(messages=[*USER, first_chat.choices[0].message, *USER], **GREEDY)
    # The template strips whitespace around an answer.
    turns = f"user: {QUESTION}\nassistant: {text_of(first_chat).strip()}\n"
    assert text_of(second_chat) == deployment.plain(turns + PROMPT, **GREEDY).choices[0].text


def test_answers_of_other_servers_can_be_sent_back(deployment: ChatServer) -> None:
    """The template gets the name and the reasoning; what describes an answer changes nothing."""
    described: dict[str, Any] = {"annotations": [{"type": "a"}], "id": "1", "audio": None}
    described |= {"function_call": None, "tool_calls": [], "thinking_blocks": [{"a": 1}]}

    def expect(line: str, message: dict[str, Any]) -> None:
        messages: list[Any] = [*USER, {"role": "assistant", **message}, *USER]
        chat = deployment.chat(messages=messages, **GREEDY)
        prompt = f"user: {QUESTION}\n{line}\n{PROMPT}"
        assert text_of(chat) == deployment.plain(prompt, **GREEDY).choices[0].text

    expect("assistant: forty", {"content": "forty", **described})
    expect("assistant: ", {"content": None, **described})
    expect("assistant: I cannot", {"content": None, "refusal": "I cannot"})
    expect("assistant: no", {"content": [{"type": "refusal", "refusal": "no"}]})
    expect("assistant: a", {"content": [{"type": "output_text", "text": "a", "annotations": []}]})
    for field in ("reasoning", "reasoning_content"):
        expect("assistant: a (b</s>)", {"content": "a", field: "b</s>"})
    expect("assistant: a", {"content": "a", "reasoning": "", "reasoning_content": None})
    expect("assistant ann: a", {"content": "a", "name": "ann"})


def test_template_options_change_the_prompt(deployment: ChatServer) -> None:
    def expect(prompt: str, messages: Any = USER, **extra: Any) -> None:
        chat = deployment.chat(messages=messages, extra_body=extra, **GREEDY)
        assert text_of(chat) == deployment.plain(prompt, **GREEDY).choices[0].text

    expect(f"user: {QUESTION}\n", add_generation_prompt=False)
    expect(PROMPT, add_generation_prompt=True, continue_final_message=False)
    expect(f"user: {QUESTION}\nkind assistant:", chat_template_kwargs={"mood": "kind"})
    expect(PROMPT, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="none")
    partial_answer = [*USER, {"role": "assistant", "content": "forty"}]
    expect(f"{PROMPT} forty", partial_answer, continue_final_message=True)
    expect(f"user: {QUESTION}\n</s> assistant:", chat_template_kwargs={"mood": "</s>"})


def rounded(prompt_logprobs: list[Any]) -> list[Any]:
    """The last digits depend on the rows that a step computes together."""
    return [
        entry
        and {
            token: {**score, "logprob": round(score["logprob"], 6)}
            for token, score in entry.items()
        }
        for entry in prompt_logprobs
    ]


def test_chats_return_token_ids_and_prompt_logprobs(deployment: ChatServer) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": 1, "request_id": "an id"}
    for model in (BASE, "sum"):
        plain = deployment.plain(model=model, extra_body=extra, n=2, **GREEDY)
        chat: Any = deployment.chat(model, extra_body=extra, n=2, **GREEDY).to_dict()
        expected: Any = plain.to_dict()
        first = expected["choices"][0]
        assert chat["id"] == "chatcmpl-an id" and expected["id"] == "cmpl-an id"
        assert chat["prompt_token_ids"] == first["prompt_token_ids"] == deployment.ids(PROMPT)
        assert rounded(chat["prompt_logprobs"]) == rounded(first["prompt_logprobs"])
        assert [choice["token_ids"] for choice in chat["choices"]] == [
            choice["token_ids"] for choice in expected["choices"]
        ]
        events: list[Any] = [
            event.to_dict()
            for event in deployment.client.chat.completions.create(
                model=model, messages=USER, stream=True, extra_body=extra, **GREEDY
            )
        ]
        assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"]
        assert all("prompt_token_ids" not in event for event in events[1:])
        streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
        assert streamed == chat["choices"][0]["token_ids"]


def test_control_tokens_in_messages_are_text(deployment: ChatServer) -> None:
    chat = deployment.chat(messages=[{"role": "user", "content": "</s><s>a"}], **GREEDY)
    ids = deployment.ids("user: </s><s>a\nassistant:")
    assert not {*ids[1:]} & {deployment.tokenizer.bos_id, deployment.tokenizer.eos_id}
    plain = deployment.client.completions.create(model=BASE, prompt=ids, **GREEDY)
    assert text_of(chat) == plain.choices[0].text


def test_streamed_chats_join_to_the_unary_answer(deployment: ChatServer) -> None:
    options: dict[str, Any] = {"seed": 7, "max_tokens": 16, "n": 2, "logprobs": True}
    unary_chat = deployment.chat("sum", top_logprobs=2, **options)
    events = list(
        deployment.client.chat.completions.create(
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
    assert unary_chat.usage is not None
    assert events[-1].usage.completion_tokens == unary_chat.usage.completion_tokens
    for choice in unary_chat.choices:
        parts = [
            token_logprob
            for event in events
            for token_logprob in event.choices
            if token_logprob.index == choice.index
        ]
        roles = [part.delta.role for part in parts]
        assert roles == ["assistant"] + [None] * (len(parts) - 1) and len(parts) > 1
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        finish_reasons = [part.finish_reason for part in parts]
        assert finish_reasons == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        logprobs_of_parts = [
            part.logprobs.content or [] for part in parts if part.logprobs is not None
        ]
        streamed_tokens = [
            token_logprob.token
            for token_logprobs in logprobs_of_parts
            for token_logprob in token_logprobs
        ]
        assert streamed_tokens == [token_logprob.token for token_logprob in choice.logprobs.content]


def test_chat_logprobs_equal_those_of_the_completion(deployment: ChatServer) -> None:
    plain = deployment.plain(logprobs=3, **GREEDY).choices[0].logprobs
    (choice,) = deployment.chat(logprobs=True, top_logprobs=3, **GREEDY).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    token_logprobs = choice.logprobs.content

    assert [token_logprob.logprob for token_logprob in token_logprobs] == pytest.approx(
        plain.token_logprobs
    )
    text = b"".join(
        bytes(token_logprob.bytes)
        for token_logprob in token_logprobs
        if token_logprob.bytes is not None
    )
    assert text.decode(errors="replace").strip() == text_of_choice(choice).strip()
    for token_logprob in token_logprobs:
        assert token_logprob.top_logprobs[0].logprob == token_logprob.logprob
        assert len(token_logprob.top_logprobs) == 3
    bare = deployment.chat(logprobs=True, **GREEDY).choices[0].logprobs
    assert bare is not None and bare.content is not None
    assert all(token_logprob.top_logprobs == [] for token_logprob in bare.content)
    assert deployment.chat(**GREEDY).choices[0].logprobs is None


def text_of_choice(choice: Any) -> str:
    content: str = choice.message.content
    return content


def test_stop_strings_length_limits_and_formats(deployment: ChatServer) -> None:
    text = text_of(deployment.chat(**GREEDY))
    stop = text[4:6]
    stopped = deployment.chat(stop=stop, **GREEDY).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    assert stopped.to_dict()["stop_reason"] == stop

    extra = {"ignore_eos": True}
    limited = deployment.chat(max_completion_tokens=3, temperature=0, extra_body=extra)
    assert limited.usage is not None and limited.usage.completion_tokens == 3
    assert limited.choices[0].finish_reason == "length"
    with_adapter = deployment.chat("sum", temperature=0, extra_body=extra)
    assert with_adapter.usage is not None and with_adapter.usage.completion_tokens == 128
    # Without a limit it continues to the end of the context.
    unlimited = deployment.chat(
        messages=user_message("word " * 980)["messages"], temperature=0, extra_body=extra
    )
    assert unlimited.usage is not None
    assert unlimited.usage.total_tokens == CONFIG.max_position_embeddings
    assert unlimited.usage.completion_tokens != 128

    shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": shape, "strict": True}}
    for form in ({"type": "json_object"}, strict):
        guided = deployment.chat(response_format=form, max_tokens=60, seed=1)
        assert text_of(guided).lstrip().startswith("{")
    assert deployment.chat(response_format={"type": "text"}, **GREEDY).choices


def test_concurrent_chats_get_the_answers_of_separate_ones(deployment: ChatServer) -> None:
    async def work() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=deployment.url, api_key="none", max_retries=0, timeout=WAIT_S
        ) as client:

            async def complete(number: int) -> str:
                stream = await client.chat.completions.create(
                    model=BASE, messages=chat(number), stream=True, **GREEDY
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(complete, range(12)))

    def chat(number: int) -> list[Any]:
        return [{"role": "user", "content": f"{QUESTION} {number}"}]

    texts = asyncio.run(work())
    assert texts == [
        text_of(deployment.chat(messages=chat(complete), **GREEDY)) for complete in range(12)
    ]


def user_message(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


TOOL = tool("f")
BAD_SCHEMA = {"properties": {"a": {"type": "obj"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hello"}, "messages", "Expected `array | null`"),
        (user_message(None), "messages", "messages[0] has no content"),
        (user_message([IMAGE]), "messages", "messages[0].content[0] has type 'image_url'"),
        (user_message([{"type": "text"}]), "messages", "no field 'text'"),
        (user_message("x", weight=1), "messages", "weight"),
        (user_message("x", tool_call_id="1"), "messages", "the role must be tool"),
        (user_message("x", tool_calls=[TOOL]), "messages", "the role must be assistant"),
        (user_message("x", reasoning="y"), "messages", "the role must be assistant"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "'king'"),
        ({"messages": USER * 41}, "messages", "messages_max"),
        (user_message("a " * 10_000), "messages", "text_bytes_max"),
        (user_message("word " * 3900), "messages", "shorten"),
        (user_message("tell"), "messages", "refuses these messages: nobody asks that"),
        (user_message("".join(ESCAPE_MARKS)), "messages", "U+FDD0"),
        ({"tools": [{**TOOL, "type": "web_search"}]}, "tools", "is not a function"),
        ({"tools": [TOOL] * 2}, "tools", "rename one of them"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "choose one of: 'f'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        (
            {"tools": [TOOL], "response_format": {"type": "json_object"}},
            "tool_choice",
            "tool_choice is auto",
        ),
        (
            {
                "tools": [tool("f", parameters=BAD_SCHEMA)],
                "tool_choice": "required",
            },
            "tools",
            "Invalid type: obj",
        ),
        ({"tools": [tool(f"f{i}") for i in range(9)]}, "tools", "tools_max"),
        ({"tools": [tool("f", description="a " * 10_000)]}, "messages", "text_bytes_max"),
        ({"extra_body": {"functions": [{}]}}, "functions", "use tools"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template", "not from requests"),
        ({"extra_body": {"prompt": "a"}}, "prompt", "/v1/completions"),
        ({"extra_body": {"echo": True}}, "echo", "/v1/completions"),
        ({"extra_body": {"top_logprob": 1}}, "top_logprob", "did you mean 'top_logprobs'"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
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
        ({"store": True}, "store", "stores no completions"),
        ({"reasoning_effort": "low"}, "reasoning_effort", 'can only be "none"'),
        ({"service_tier": "flex"}, "service_tier", '"auto" or "default"'),
        ({"modalities": ["text", "audio"]}, "modalities", '["text"]'),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            "continue_final_message",
            "only one",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"messages": []}}},
            "chat_template_kwargs",
            "'messages'",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"bos_token": ""}}},
            "chat_template_kwargs",
            "'bos_token'",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"a": "b" * 20_000}}},
            "messages",
            "messages and chat_template_kwargs",
        ),
        ({"extra_body": {"include_reasoning": False}}, "include_reasoning", "can only be true"),
        ({"stop": ["a"] * 100}, "stop", "at most"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_invalid_fields_are_reported_by_their_openai_names(
    deployment: ChatServer, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        deployment.chat(**{"max_tokens": 4, **options} if "messages" in options else options)

    error = caught.value
    assert words in str(error)
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert error.code in ("INVALID_FIELD", "PROMPT_TOO_LONG")
    assert not any(mark in str(error) for mark in ESCAPE_MARKS)


def test_deadlines_and_overload_fail_as_on_other_endpoints(deployment: ChatServer) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        deployment.chat("dog", **GREEDY)
    assert (unknown.value.code, unknown.value.param) == ("UNKNOWN_MODEL", "model")
    with pytest.raises(openai.APIStatusError) as caught:
        deployment.chat(extra_body={"timeout": 0.05, "ignore_eos": True})
    assert caught.value.code == "DEADLINE_PASSED"
    running_stream = deployment.client.chat.completions.create(
        model=BASE, messages=USER, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(running_stream))
    running_stream.close()
    eventually(lambda: deployment.server.metric("preamble_scheduler_running_requests") == 0)
    assert deployment.server.metric(
        'preamble_requests_total{code="OK",method="chat",wire="openai"}'
    )


def test_chats_without_a_template_explain_the_flag(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    with serving(checkpoint, tmp_path / "s.yaml") as server:
        deployment = ChatServer(server, open_tokenizer(checkpoint / "tokenizer"))
        with pytest.raises(openai.BadRequestError, match="--chat-template FILE") as caught:
            deployment.chat(**GREEDY)
        assert caught.value.param == "messages"
        assert deployment.plain(**GREEDY).choices[0].text

    template_file = tmp_path / "given.jinja"
    template_file.write_text(CHATML)
    servable = ServableCheckpoint.from_config(
        ServerConfig(str(checkpoint), chat_template=str(template_file))
    )
    assert servable.chat_template is not None and servable.chat_template.text == CHATML
    template_file.write_text("{% if %}")
    completed = subprocess.run(
        command("serve", checkpoint, "--chat-template", template_file),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode == 1
    assert "given.jinja is invalid: line 1" in completed.stderr


def test_conversion_keeps_the_chat_template(deployment: ChatServer, tmp_path: Path) -> None:
    source = tmp_path / "words"
    source.mkdir()
    (source / "tokenizer.model").write_bytes(sentencepiece_model(model_type="bpe"))
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (source / "chat_template.jinja").write_text(CHATML)
    write_native(lively(CONFIG), tmp_path / "native", tokenizer=source)
    for kind in ("hf", "megatron", "megatron-dist"):
        target = tmp_path / kind
        assert preamble.main(["convert", str(tmp_path / "native"), str(target), "--to", kind]) == 0
        tokenizer_folder = open_checkpoint(target).tokenizer
        template = find_template(tokenizer_folder, deployment.tokenizer)
        assert template is not None and template.text == CHATML, kind


# ---------------------------------------------------------------------------- the template process


def sandboxed_renderer(template: str, tokenizer: Tokenizer) -> ChatPromptRenderer:
    config = ServerConfig("m", text_bytes_max=10_000)
    return ChatPromptRenderer(
        ChatTemplate(template, {}, Path("x")), tokenizer, config.model_config, config.limits_config
    )


def test_endless_templates_are_killed_and_later_chats_work(deployment: ChatServer) -> None:
    turns = "{% for b in range(99999) %}{% endfor %}"
    stuck = f"{{% if messages[0].content == 'stop' %}}{{% for a in range(99999) %}}{turns}"
    chat = sandboxed_renderer(stuck + "{% endfor %}{% endif %}x", deployment.tokenizer)
    ids = chat.encode_blocking(USER)
    start = time.process_time()
    with pytest.raises(RequestError, match=f"needs more than {SECONDS_MAX} s"):
        chat.encode_blocking([{"role": "user", "content": "stop"}])

    assert time.process_time() - start < 1  # The time was spent in the other process.
    assert chat.encode_blocking(USER) == ids
    chat.close()


def test_template_memory_is_limited(deployment: ChatServer) -> None:
    for template, message_words in (
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        (
            "{% set n = namespace(x='a' * 99) %}{% for i in range(40) %}{% set n.x = n.x * 8 %}"
            "{% endfor %}",
            "memory",
        ),
        ("{{ '%999999999s' | format(1) }}", "memory|text_bytes_max|needs more than"),
        ("{{ messages[0].nothing }}", "empty text"),
    ):
        chat = sandboxed_renderer(template, deployment.tokenizer)
        with pytest.raises(RequestError, match=message_words):
            chat.encode_blocking(USER)
        chat.close()


def test_killed_template_processes_restart(deployment: ChatServer) -> None:
    chat = sandboxed_renderer("{{ messages[0].content }}", deployment.tokenizer)
    ids = chat.encode_blocking(USER)
    process = chat._template_process._process
    assert process is not None
    process.kill()
    eventually(lambda: process.poll() is not None)
    assert chat.encode_blocking(USER) == ids
    chat.close()
    assert chat._template_process._process is not None
    assert chat._template_process._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("words", [2, 40_000])  # More than a pipe holds.
def test_stopped_template_processes_are_replaced(deployment: ChatServer, words: int) -> None:
    config = ServerConfig("m", chat_template_s=1.0)
    template = ChatTemplate("{{ messages[0].content[:20] }}", {}, Path("x"))
    chat = ChatPromptRenderer(
        template, deployment.tokenizer, config.model_config, config.limits_config
    )
    messages = user_message("a b " * words)["messages"]
    ids = chat.encode_blocking(messages)
    process = chat._template_process._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    assert chat.encode_blocking(messages) == ids
    assert process.returncode == -signal.SIGKILL
    chat.close()


def test_the_template_process_cannot_open_files() -> None:
    program = """
from serving.admission.template_sandbox import _set_resource_limits
_set_resource_limits()
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
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert (completed.stdout, completed.returncode) == ("", 0), completed.stderr
