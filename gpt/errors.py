"""Exceptions that a user can act on: checkpoint, adapter, configuration and request errors.

Each message is one sentence: what was found, what is needed, what to do next. A command prints the
message and exits with status 1; a server maps the class to a status code. Any other exception is a
bug and may crash.
"""


class PreambleError(Exception):
    """The base class of all errors whose message is written for a user.

    A message may contain names from untrusted files, so characters that are not printable (line
    breaks, terminal control sequences) are shown as escapes.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class CheckpointError(PreambleError):
    """Checkpoint files are damaged, missing, of an unknown format, or contradict one another."""


class AdapterError(PreambleError):
    """An adapter is damaged, or was trained on another base model."""


class ConfigError(PreambleError):
    """An invalid flag, key of a configuration file, or parallel split."""


class RequestError(PreambleError):
    """An invalid request; `field` names the request field that the caller must change."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """The prompt has more tokens than its limit, so the context has no position for a new token."""
