"""Chat prompts: converts chat messages to prompt ids; a sandbox process renders the template.

The module starts the sandbox process on first use, restarts it after it has ended, and limits its
input. One thread renders one chat at a time, so that a slow template delays only other chats. The
module is independent of the protocols.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import msgspec

from gpt.child_processes import ChildProcess, child_environment
from gpt.errors import ConfigError, PreambleError, RequestError
from gpt.settings import short_repr
from gpt.tokenizers.chat_template import ChatTemplate, ChatTemplateEncoder
from gpt.tokenizers.tokenizer import Tokenizer
from serving.admission.template_sandbox import (
    SECONDS_MAX,
    RenderReply,
    RenderRequest,
    TemplateSetup,
    find_syntax_error,
    global_names,
    variable_names,
)
from serving.admission.tool_prompt import describe_tools, find_call_format, template_takes_tools
from serving.config import CallFormat, LimitsConfig, ModelConfig
from serving.request import UnavailableError

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 1.0
START_TIMEOUT_S = 30.0  # Time limit for the start of the process and for compiling the template.
# Environment variables that the sandbox process needs to start; none of them is a secret.
INHERITED_VARIABLES = {
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LANG",
    "TZ",
}
# Variables that `chat_template_kwargs` may not have, because the server sets them.
RESERVED_NAMES = {"messages", "tools", "continue_final_message"}
NO_TEMPLATE = (
    "this model has no chat template; start the server with --chat-template FILE, or put "
    "chat_template.jinja beside the tokenizer, or send a prompt to /v1/completions"
)


@dataclass(frozen=True)
class ChatPromptOptions:
    """The options of a chat's prompt, which a request can set."""

    # Whether the prompt ends with the beginning of the assistant's next message. None: as the
    # template does by default.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False  # Whether the prompt ends within the last message.
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # Variables of the template.
    parse_special_tokens: bool = False  # Whether control tokens in the messages become their ids.


DEFAULT_OPTIONS = ChatPromptOptions()


class ChatPromptRenderer:
    """Converts the chats of one model to prompt ids.

    `template`: None if the model has no chat template.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        model_config: ModelConfig,
        limits_config: LimitsConfig,
    ) -> None:
        self._limits_config = limits_config
        self._tokenizer = tokenizer
        self._unusable_reason: str | None = NO_TEMPLATE
        if template is None:
            return
        self._chat_tokens = ChatTemplateEncoder(template, tokenizer)
        self._variable_names = variable_names(template.text)
        self._reserved_names = global_names() | RESERVED_NAMES | template.special_tokens.keys()
        self._template_text = template.text
        self._call_format = model_config.tool_call_format
        self._executor = ThreadPoolExecutor(1, "chat")
        setup = TemplateSetup(
            template.text, dict(template.special_tokens), limits_config.text_bytes_max
        )
        self._template_process = _TemplateProcess(setup, limits_config.chat_template_s)
        problem = find_syntax_error(template.text)
        if problem is None and model_config.chat_template is not None:
            try:
                self._template_process.start()
            except RequestError as error:
                problem = str(error)
        if problem is None:
            self._unusable_reason = None
            self._takes_tools = template_takes_tools(template.text)
            return
        self._unusable_reason = f"the chat template in {template.source} is invalid: {problem}"
        if model_config.chat_template is not None:
            raise ConfigError(f"{self._unusable_reason}; correct it, or remove chat_template")
        log.warning("event=chat_template_unusable note=%r", self._unusable_reason)

    @property
    def is_usable(self) -> bool:
        """Whether the model has a valid chat template, so that it accepts chats."""
        return self._unusable_reason is None

    @property
    def call_format(self) -> CallFormat:
        """The format in which the model writes calls of tools."""
        if self._call_format != "auto":
            return cast(CallFormat, self._call_format)
        return find_call_format(self._template_text) if self._takes_tools else "hermes"

    async def encode(
        self,
        messages: list[dict[str, Any]],
        options: ChatPromptOptions = DEFAULT_OPTIONS,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        """Return the ids of the prompt for the assistant's next message.

        `tools`: the functions that the model may call, as in OpenAI's API.
        """
        if self._unusable_reason is not None:
            raise RequestError(self._unusable_reason, "messages")
        variables = self._template_variables(options)
        try:
            self._check_messages(messages, variables, tools)
        except RecursionError:
            raise _nesting_error() from None
        if options.continue_final_message and not messages[-1]["content"]:
            raise RequestError(
                "continue_final_message is true, but the last message has no content to continue",
                "continue_final_message",
            )
        encode = partial(
            self.encode_blocking,
            messages,
            variables,
            tools,
            continue_final_message=options.continue_final_message,
            parse_special_tokens=options.parse_special_tokens,
        )
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode)

    def encode_blocking(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        tools: list[dict[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        parse_special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """Return the ids of checked messages: the blocking part of `encode`. Not thread-safe."""
        try:
            if tools and self._takes_tools:
                variables = {**variables, "tools": tools}
            elif tools:
                with_calls = "tool_calls" not in self._template_text
                messages = describe_tools(messages, tools, with_calls=with_calls)
            chat = self._chat_tokens.escape_messages(
                messages,
                variables,
                continue_final_message=continue_final_message,
                keep_control_tokens=parse_special_tokens,
            )
        except RecursionError:
            raise _nesting_error() from None
        try:
            text = self._template_process.render(RenderRequest(chat.messages, chat.variables))
        except RecursionError:
            raise _nesting_error() from None
        except RequestError as error:
            # Where a message contains the text of a control token, `escape_messages` has inserted a
            # mark. The error may quote the message, so the marks are removed from the error.
            raise RequestError(chat.remove_marks(str(error)), error.field) from None
        text = chat.cut_rendered(text)
        if parse_special_tokens:
            ids = tuple(self._tokenizer.encode(text, allow_special=True))
        else:
            ids = self._chat_tokens.encode_rendered(text, chat.mark)
        if not ids:
            raise RequestError(
                "the chat template renders these messages to an empty text", "messages"
            )
        return ids

    def close(self) -> None:
        if self._unusable_reason is None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._template_process.close()

    def _template_variables(self, options: ChatPromptOptions) -> dict[str, Any]:
        """Return the variables of the template that the options set."""
        for name in options.template_kwargs:
            if not name.isidentifier() or name in self._reserved_names:
                raise RequestError(
                    f"chat_template_kwargs has {short_repr(name)}; a name must be that of a "
                    "variable, and must not be that of a message, a token or a function of the "
                    "template",
                    "chat_template_kwargs",
                )
        variables = dict(options.template_kwargs)
        add_generation_prompt = options.add_generation_prompt
        if add_generation_prompt is not None:
            if not (
                add_generation_prompt
                or options.continue_final_message
                or "add_generation_prompt" in self._variable_names
            ):
                raise RequestError(
                    "add_generation_prompt is false, but this model's chat template does not have "
                    "the variable add_generation_prompt; remove it",
                    "add_generation_prompt",
                )
            variables["add_generation_prompt"] = add_generation_prompt
        effort = options.reasoning_effort
        if effort is not None and "reasoning_effort" in self._variable_names:
            variables["reasoning_effort"] = effort
        elif effort not in (None, "none"):
            raise RequestError(
                f"reasoning_effort is {short_repr(effort)}; this model's chat template does not "
                'have the variable reasoning_effort, so it can only be "none": remove it',
                "reasoning_effort",
            )
        return variables

    def _check_messages(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        tools: list[dict[str, Any]] | None,
    ) -> None:
        if not messages:
            raise RequestError("messages is empty; it needs at least one message", "messages")
        messages_max = self._limits_config.messages_max
        if len(messages) > messages_max:
            raise RequestError(
                f"messages has {len(messages)} entries; it may have at most {messages_max} "
                "(messages_max)",
                "messages",
            )
        tools_max = self._limits_config.tools_max
        if tools and len(tools) > tools_max:
            raise RequestError(
                f"tools has {len(tools)} entries; it may have at most {tools_max} (tools_max)",
                "tools",
            )
        parts = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
        set_parts = {name: part for name, part in parts.items() if part}
        size = len(msgspec.json.encode(list(set_parts.values())))
        if size > self._limits_config.text_bytes_max:
            raise RequestError(
                f"the {' and '.join(set_parts)} are {size} bytes; this server takes at most "
                f"{self._limits_config.text_bytes_max} (text_bytes_max)",
                "messages",
            )


def _nesting_error() -> RequestError:
    return RequestError(
        "the tools, the tool arguments in the messages, or the chat_template_kwargs are nested too "
        "deeply",
        "messages",
    )


class _ProcessStuckError(UnavailableError):
    """The sandbox process did not answer within the time limit, and was killed."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the chat template's process did not answer within {timeout_s:g} s (chat_template_s);"
            " try again in a moment",
            "ENGINE_LOST",
        )


class _TemplateProcess:
    """The sandbox process. All calls except `close` must come from one thread."""

    def __init__(self, setup: TemplateSetup, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._setup_line = msgspec.json.encode(setup).decode() + "\n"
        self._process: ChildProcess | None = None
        self._closed = False

    def render(self, request: RenderRequest) -> str:
        if self._process is not None and self._process.poll() is not None:
            # The process ended between two chats. This chat is not the cause, so a new process
            # renders it.
            self._reap(self._process)
            self._process = None
        request_line = msgspec.json.encode(request).decode() + "\n"
        process = self._process or self.start()
        try:
            return self._exchange(process, request_line, self._timeout_s).text
        except _ProcessStuckError:
            # Perhaps another program stopped the process, so a new process renders this chat.
            return self._exchange(self.start(), request_line, self._timeout_s).text

    def start(self) -> ChildProcess:
        """Start the process and send the template; raise RequestError if it does not compile."""
        process = self._process = self._spawn()
        try:
            self._exchange(process, self._setup_line, START_TIMEOUT_S)
        except RequestError:
            if self._process is not None:
                self._reap(process)  # The process has rejected the template and ends.
                self._process = None
            raise
        return process

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._reap(self._process)

    def _spawn(self) -> ChildProcess:
        if self._closed:
            raise UnavailableError("this server is shutting down; try another server", "DRAINING")
        environment = {name: os.environ[name] for name in INHERITED_VARIABLES & os.environ.keys()}
        try:
            return ChildProcess(
                [sys.executable, "-m", "serving.admission.template_sandbox"],
                environment=child_environment(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except OSError as error:  # For example, no free file descriptor, or too little memory.
            raise UnavailableError(
                f"the chat template's process cannot be started ({error.strerror}); try again in a "
                "moment",
                "ENGINE_LOST",
            ) from None

    def _exchange(self, process: ChildProcess, request_line: str, timeout_s: float) -> RenderReply:
        """Send a line and return the reply; raise _ProcessStuckError after the time limit.

        A process that is stopped uses no CPU time, so its own limit does not end it.
        """
        assert process.stdin is not None and process.stdout is not None
        is_stuck = threading.Event()

        def kill() -> None:
            is_stuck.set()
            process.kill()  # Ends the blocking write or read of this thread.

        reply_line = ""
        timer = threading.Timer(timeout_s, kill)
        timer.daemon = True
        timer.start()
        # ValueError: the pipe was closed meanwhile.
        with suppress(BrokenPipeError, ValueError):
            process.stdin.write(request_line)
            process.stdin.flush()
            reply_line = process.stdout.readline()
        timer.cancel()
        if not reply_line.endswith("\n"):
            if is_stuck.is_set():
                self._reap(process)
                self._process = None
                log.warning("event=chat_template_process_stuck timeout_s=%g", timeout_s)
                raise _ProcessStuckError(timeout_s)
            raise self._exit_error(process)
        reply = msgspec.json.decode(reply_line, type=RenderReply)
        if reply.error is not None:
            raise RequestError(reply.error, "messages")
        return reply

    def _exit_error(self, process: ChildProcess) -> PreambleError:
        """Return the error for a process that has ended; forget the process.

        The next call of `render` starts a new process.
        """
        exit_code = self._reap(process)
        self._process = None
        if exit_code == -signal.SIGPROF:
            return RequestError(
                f"the chat template needs more than {SECONDS_MAX} s of CPU time for these "
                "messages; send fewer or shorter ones",
                "messages",
            )
        if self._closed:
            return UnavailableError("this server is shutting down; try another server", "DRAINING")
        log.warning("event=chat_template_process_ended code=%d", exit_code)
        return RequestError(
            "the chat template's process ended while it rendered these messages, perhaps for lack "
            "of memory; send fewer or shorter ones",
            "messages",
        )

    def _reap(self, process: ChildProcess) -> int:
        """Wait until the process has ended; return its exit code."""
        process.close_pipes()
        return process.wait_or_kill(EXIT_TIMEOUT_S)
