"""What can go wrong that a person can put right.

Each message is one sentence: what was found, what is needed, what to do next. A command prints it
and exits 1; a server maps the class to a status code. Everything else is a bug and may crash.
"""


class PreambleError(Exception):
    """The base of every error whose text is meant for a user.

    Names in a message come from files that anyone wrote: what would break the line, or speak to the
    terminal, is shown as an escape.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class CheckpointError(PreambleError):
    """The files of a checkpoint are broken, missing, foreign, or disagree with each other."""


class AdapterError(PreambleError):
    """An adapter is broken, or belongs to another base."""


class ConfigError(PreambleError):
    """A flag, a key of a configuration file, or a parallel split that cannot be."""


class RequestError(PreambleError):
    """A request that its caller can fix; `field` names the part at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer."""
