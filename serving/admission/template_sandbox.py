"""Sandboxed chat templates: renders jinja2 in a separate process with CPU and memory limits.

A template is a program that comes with a checkpoint, so it is not trusted. It runs in jinja2's
sandbox, inside a process (`python -m serving.admission.template_sandbox`) that has limited memory
and cannot open files or start programs. The kernel kills the process when a rendering exceeds its
CPU time. The process reads render requests from standard input; it has no tokenizer and no
connection to the server.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.debug  # Otherwise jinja2 imports it on the first error, and cannot open the file.
import jinja2.ext
import jinja2.sandbox
import msgspec

SECONDS_MAX = 2  # Limit of CPU time, for compiling the template and for each rendering.
MEMORY_BYTES_MAX = 1 << 30  # Limit of the process's address space.
OPEN_FILES_MAX = 3  # stdin, stdout and stderr.
ERROR_CHARACTERS_MAX = 300
# This template is rendered before the limits apply, so that the modules that jinja2 and Python
# import at first use are loaded.
WARMUP_TEMPLATE = (
    r"""{{ 'é\n'|pprint }}{{ strftime_now('%d %b %Y') }}{{ [1]|tojson }}{{ [1]|random }}"""
)


class TemplateSetup(msgspec.Struct):
    """The first message to the process: the template for all later render requests."""

    template: str
    names: dict[str, str]  # Variables of the template: the names and texts of special tokens.
    text_bytes_max: int  # Limit of a rendered text.


class RenderRequest(msgspec.Struct):
    messages: list[dict[str, Any]]
    variables: dict[str, Any] = {}  # They replace variables with an equal name.


class RenderReply(msgspec.Struct):
    text: str = ""
    error: str | None = None


class TemplateRejectedError(jinja2.TemplateError):
    """The template refuses the messages (by `raise_exception`), or the text is over its limit."""


def parse_template(text: str) -> jinja2.nodes.Template:
    """Parse a template without running it. May raise any exception."""
    return _sandbox_environment().parse(text)


def find_syntax_error(text: str) -> str | None:
    """Parse a template without running it; return its syntax error, or None."""
    try:
        for _ in parse_template(text).find_all(jinja2.nodes.Node):
            pass  # Later steps visit all nodes; a RecursionError must be found here.
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except RecursionError:
        return "it is nested too deeply"
    except Exception as error:  # For example, jinja2 raises ValueError for very long numbers.
        return f"{type(error).__name__}: {_error_text(error)}"
    return None


def variable_names(text: str) -> frozenset[str]:
    """Return the names of all variables in a template; empty if the template is invalid."""
    try:
        nodes = _sandbox_environment().parse(text).find_all(jinja2.nodes.Name)
        return frozenset(node.name for node in nodes)
    except Exception:
        return frozenset()


def global_names() -> frozenset[str]:
    """Return the names of the functions that templates can call."""
    return frozenset(_sandbox_environment().globals)


class TemplateRenderer:
    """A compiled template. This class sets no limits of CPU time and memory; `main` does."""

    def __init__(self, setup: TemplateSetup) -> None:
        self._template = _sandbox_environment().from_string(setup.template)
        self._names = setup.names
        self._bytes_max = setup.text_bytes_max

    def render(
        self,
        messages: list[dict[str, Any]],
        request_variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render the prompt for the next assistant message. May raise any exception."""
        parts, size = [], 0
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **request_variables,
            "messages": messages,
        }
        for part in self._template.generate({**self._names, **variables}):
            size += len(part.encode())
            if size > self._bytes_max:
                raise TemplateRejectedError(
                    f"the rendered text is over {self._bytes_max} bytes (text_bytes_max)"
                )
            parts.append(part)
        return "".join(parts)


class _GenerationTag(jinja2.ext.Extension):
    """The jinja2 tag `generation`, which marks training targets. It renders just its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2.

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without private attributes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace may not have the attribute {name!r}"
            )
        super().__setitem__(name, value)


def _sandbox_environment() -> jinja2.Environment:
    """Create an environment with transformers' globals, filters and rules for whitespace."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
        "dict": lambda *pairs, **more: dict(*pairs, **more),
    }
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRejectedError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, as transformers does; jinja2's own `tojson` escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def render_reply(renderer: TemplateRenderer, request: RenderRequest) -> RenderReply:
    try:
        return RenderReply(renderer.render(request.messages, request.variables))
    except TemplateRejectedError as error:
        return RenderReply(error=f"the chat template refuses these messages: {_error_text(error)}")
    except MemoryError:
        return RenderReply(error="the chat template needs too much memory for these messages")
    except Exception as error:
        cause = f"{type(error).__name__}: {_error_text(error)}"
        return RenderReply(error=f"the chat template fails on these messages ({cause})")


def _error_text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:ERROR_CHARACTERS_MAX].encode(errors="replace").decode()


def _set_resource_limits() -> None:
    """Limit this process: it cannot open files, start processes, dump core or use much memory."""
    TemplateRenderer(TemplateSetup(WARMUP_TEMPLATE, {}, 1000)).render([])
    for rlimit, limit in (
        (resource.RLIMIT_NOFILE, OPEN_FILES_MAX),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, MEMORY_BYTES_MAX),
    ):
        resource.setrlimit(rlimit, (limit, limit))


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        # The server handles these signals, and ends this process by closing the pipe.
        signal.signal(signum, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    decode_request = msgspec.json.Decoder(RenderRequest).decode
    setup = msgspec.json.decode(requests.readline(), type=TemplateSetup)
    _set_resource_limits()

    def send_reply(reply: RenderReply) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()

    # After this CPU time, the kernel sends SIGPROF, which ends the process.
    signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
    try:
        renderer = TemplateRenderer(setup)
    except MemoryError:
        send_reply(RenderReply(error="the chat template needs too much memory to be read"))
        return
    except Exception as error:
        cause = f"{type(error).__name__}: {_error_text(error)}"
        send_reply(RenderReply(error=f"the chat template cannot be read ({cause})"))
        return
    send_reply(RenderReply())
    while line := requests.readline():
        request = decode_request(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
        send_reply(render_reply(renderer, request))


if __name__ == "__main__":
    main()
    os._exit(0)
