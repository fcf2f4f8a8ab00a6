"""Exceptions that a user can act on: checkpoint, adapter, configuration and request errors.

Each message is one sentence: what was found, what is needed, what to do next. A command prints the
message and exits with status 1; a server maps the class to a status code. Any other exception means
a bug.
"""


def printable(text: str) -> str:
    """Escape the characters of a text that are not printable, such as terminal control codes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; Ray's have many, and some errors have none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class PreambleError(Exception):
    """The base class of all errors whose message is written for a user.

    A message may contain names from untrusted files. `str` therefore escapes characters that are
    not printable, such as line breaks and terminal control sequences.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class CheckpointError(PreambleError):
    """Checkpoint files are missing, damaged, inconsistent, or of an unknown format."""


class AdapterError(PreambleError):
    """An adapter is damaged, or does not fit the base model."""


class ConfigError(PreambleError):
    """A flag, a key of a configuration file or a parallel split is invalid."""


class RequestError(PreambleError):
    """A request is invalid; `field` names the request field to change, if there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """A prompt, or in training a prompt with its answer, has more tokens than the limit."""
