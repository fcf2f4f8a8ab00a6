"""Chat: messages become a prompt's ids, by a template that runs in a process beside this one.

Here are that process, started when it is needed and again when it ended, and the bounds of what it
is given. One rendering at a time, in a thread of its own, so that a slow template holds up nothing
but chats. Knows no wire.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from gpt.child_processes import child_environment
from gpt.errors import ConfigError, PreambleError, RequestError
from gpt.tokenizers.chat_template import ChatTemplate, ChatTokens
from gpt.tokenizers.tokenizer import Tokenizer
from serving.admission.template_sandbox import SECONDS_MAX, Charge, Order, Reply, fault
from serving.config import ServerConfig
from serving.request import UnavailableError

log = logging.getLogger(__name__)

END_S = 1.0
# Of the environment, what a template's process needs to begin; nothing of it is a secret.
KEPT = {"PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "TZ"}
MISSING = (
    "this model came without a chat template; start the server with --chat-template FILE, or put "
    "chat_template.jinja beside the tokenizer, or send a prompt to /v1/completions"
)


class Chat:
    """The chats of one model. `template`: None if it has none."""

    def __init__(
        self, template: ChatTemplate | None, tokenizer: Tokenizer, config: ServerConfig
    ) -> None:
        self._config = config
        self._wrong: str | None = MISSING
        if template is None:
            return
        self._tokens = ChatTokens(template, tokenizer)
        self._thread = ThreadPoolExecutor(1, "chat")
        charge = Charge(template.text, dict(template.names), config.text_bytes_max)
        self._renderer = _Renderer(charge)
        wrong = fault(template.text)
        if wrong is None and config.chat_template is not None:
            try:
                self._renderer.begin()
            except RequestError as error:
                wrong = str(error)
        self._wrong = wrong and f"the chat template in {template.where} is none: {wrong}"
        if self._wrong is not None:
            if config.chat_template is not None:
                raise ConfigError(f"{self._wrong}; correct it, or leave chat_template out")
            log.warning("event=chat_template_unusable note=%r", self._wrong)

    async def ids(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """The prompt for the next answer."""
        if self._wrong is not None:
            raise RequestError(self._wrong, "messages")
        self._check(messages)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(self.prompt, messages))

    def prompt(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """The same, while the caller waits; one at a time."""
        try:
            marked = self._tokens.marked(messages)
        except RecursionError:
            raise _too_deep() from None
        try:
            text = self._renderer.render(marked.messages)
        except RecursionError:
            raise _too_deep() from None
        except RequestError as error:  # It may tell what stands in a message.
            raise RequestError(str(error).replace(marked.mark, ""), error.field) from None
        ids = self._tokens.ids(text, marked.mark)
        if not ids:
            raise RequestError("the chat template makes no text of these messages", "messages")
        return ids

    def close(self) -> None:
        if self._wrong is None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._renderer.close()

    def _check(self, messages: list[dict[str, Any]]) -> None:
        if not messages:
            raise RequestError("messages is empty; it needs at least one", "messages")
        most = self._config.messages_max
        if len(messages) > most:
            raise RequestError(
                f"messages has {len(messages)}; at most {most} may be (messages_max)", "messages"
            )
        size = len(msgspec.json.encode(messages))
        if size > self._config.text_bytes_max:
            raise RequestError(
                f"the messages are {size} bytes; this server takes at most "
                f"{self._config.text_bytes_max} (text_bytes_max)",
                "messages",
            )


def _too_deep() -> RequestError:
    return RequestError(
        "the messages have arguments of tools that are nested too deeply", "messages"
    )


class _Renderer:
    """The process that runs the template. For one thread; only the end may come from another."""

    def __init__(self, charge: Charge) -> None:
        self._charge = msgspec.json.encode(charge) + b"\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def render(self, messages: list[dict[str, Any]]) -> str:
        if self._process is not None and self._process.poll() is not None:
            self._end(self._process)  # Between two chats, so none of them is to blame.
            self._process = None
        process = self._process or self.begin()
        return self._asked(process, msgspec.json.encode(Order(messages)) + b"\n").text

    def begin(self) -> "subprocess.Popen[bytes]":
        """Start it, and have it read the template, which may be none for all that is seen here."""
        process = self._process = self._started()
        try:
            self._asked(process, self._charge)
        except RequestError:
            if self._process is not None:
                self._end(process)  # It has said so, and ends.
                self._process = None
            raise
        return process

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._end(self._process)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._closed:
            raise UnavailableError("this server is shutting down; try another", "DRAINING")
        kept = {name: os.environ[name] for name in KEPT & os.environ.keys()}
        return subprocess.Popen(
            [sys.executable, "-m", "serving.admission.template_sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(kept),
            start_new_session=True,  # Ctrl-C is for the server, which then drains.
        )

    def _asked(self, process: "subprocess.Popen[bytes]", order: bytes) -> Reply:
        assert process.stdin is not None and process.stdout is not None
        line = b""
        with suppress(BrokenPipeError, ValueError):  # The second: closed meanwhile.
            process.stdin.write(order)
            process.stdin.flush()
            line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._lost(process)
        reply = msgspec.json.decode(line, type=Reply)
        if reply.error is not None:
            raise RequestError(reply.error, "messages")
        return reply

    def _lost(self, process: "subprocess.Popen[bytes]") -> PreambleError:
        """It has ended. The next call starts another."""
        code = self._end(process)
        self._process = None
        if code == -signal.SIGPROF:
            return RequestError(
                f"the chat template takes over {SECONDS_MAX} s of a processor for these messages; "
                "send fewer or shorter ones",
                "messages",
            )
        if self._closed:
            return UnavailableError("this server is shutting down; try another", "DRAINING")
        log.warning("event=chat_template_process_ended code=%d", code)
        return RequestError(
            "the chat template ended its own process over these messages: it may need too much "
            "memory for them; send fewer or shorter ones",
            "messages",
        )

    def _end(self, process: "subprocess.Popen[bytes]") -> int:
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(END_S)
