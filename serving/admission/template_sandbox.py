"""Chat templates, run in a process of their own: `python -m serving.admission.template_sandbox`.

A template is a program from somebody's checkpoint. It runs in jinja2's sandbox; the process around
that has little memory, opens no file, starts nothing, and is ended by the kernel when a rendering
has used up its time. It reads orders from its standard input, and knows no tokenizer and no server.
"""

import json
import os
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.debug  # Imported by jinja2 when it is needed, which is too late here.
import jinja2.ext
import jinja2.sandbox
import msgspec

SECONDS_MAX = 2  # Of the processor, for reading a template and for each rendering.
MEMORY_BYTES_MAX = 1 << 30
FILES_MAX = 3  # What it was given.
SAID_CHARACTERS_MAX = 300
# Has Python load what it loads only when a template needs it.
FIRST = r"""{{ 'é\n'|pprint }}{{ strftime_now('%d %b %Y') }}{{ [1]|tojson }}{{ [1]|random }}"""


class Charge(msgspec.Struct):
    """The first order: what to render from now on."""

    template: str
    names: dict[str, str]
    text_bytes_max: int


class Order(msgspec.Struct):
    messages: list[dict[str, Any]]


class Reply(msgspec.Struct):
    text: str = ""
    error: str | None = None


class RefusalError(jinja2.TemplateError):
    """What a template says of messages that it does not take."""


def fault(text: str) -> str | None:
    """What is wrong with a template, as far as reading it tells. Nothing of it is run."""
    try:
        _environment().parse(text)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except RecursionError:
        return "it is nested too deeply"
    except Exception as error:  # The library's own, over numbers of 5,000 digits and the like.
        return f"{type(error).__name__}: {_said(error)}"
    return None


class Rendering:
    """A template, ready to render. Whoever wants its limits runs `main`."""

    def __init__(self, charge: Charge) -> None:
        self._template = _environment().from_string(charge.template)
        self._names, self._bytes_max = charge.names, charge.text_bytes_max

    def render(self, messages: list[dict[str, Any]]) -> str:
        """As the prompt of an answer. Raises whatever a template can."""
        parts, size = [], 0
        given = {"tools": None, "documents": None, "add_generation_prompt": True}
        for part in self._template.generate({**self._names, **given, "messages": messages}):
            size += len(part.encode())
            if size > self._bytes_max:
                raise RefusalError(
                    f"what it makes of them is over {self._bytes_max} bytes (text_bytes_max)"
                )
            parts.append(part)
        return "".join(parts)


class _Marks(jinja2.ext.Extension):
    """`generation` tells trainers what the model is to learn, and nothing here."""

    tags = {"generation"}  # noqa: RUF012 - the library's own declaration.

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not have {name!r}")
        super().__setitem__(name, value)


def _environment() -> jinja2.Environment:
    """As the library that trains models has it: the same names, the same spaces."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    del made.globals["lipsum"]
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
        "dict": lambda *pairs, **more: dict(*pairs, **more),
    }
    return made


def _raise(message: object) -> NoReturn:
    raise RefusalError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: the library's own is written to stand in HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def replied(rendering: Rendering, order: Order) -> Reply:
    try:
        return Reply(rendering.render(order.messages))
    except RefusalError as error:
        return Reply(error=f"the chat template refuses these messages: {_said(error)}")
    except MemoryError:
        return Reply(error="the chat template needs too much memory for these messages")
    except Exception as error:
        what = f"{type(error).__name__}: {_said(error)}"
        return Reply(error=f"the chat template fails on these messages ({what})")


def _said(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said[:SAID_CHARACTERS_MAX].encode(errors="replace").decode()


def _confine() -> None:
    """From now on no file can be opened, nothing be started, and memory has an end."""
    Rendering(Charge(FIRST, {}, 1000)).render([])
    for kind, most in (
        (resource.RLIMIT_NOFILE, FILES_MAX),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, MEMORY_BYTES_MAX),
    ):
        resource.setrlimit(kind, (most, most))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # They are for the server, which closes the pipe.
    orders, replies = sys.stdin.buffer, sys.stdout.buffer
    order_of = msgspec.json.Decoder(Order).decode
    charge = msgspec.json.decode(orders.readline(), type=Charge)
    _confine()

    def say(reply: Reply) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()

    # When that is over, so is the process.
    signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
    try:
        rendering = Rendering(charge)
    except MemoryError:
        say(Reply(error="the chat template needs too much memory to be read"))
        return
    except Exception as error:
        what = f"{type(error).__name__}: {_said(error)}"
        say(Reply(error=f"the chat template cannot be read ({what})"))
        return
    say(Reply())
    while line := orders.readline():
        order = order_of(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
        say(replied(rendering, order))


if __name__ == "__main__":
    main()
    os._exit(0)
