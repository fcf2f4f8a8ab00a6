"""HTML template: renders a self-contained page from a jinja2 template, with style sheet and script.

Pages extend layout.html, whose content security policy forbids loading anything. Every value that a
template inserts is truncated, cleaned of invisible characters and escaped, so text cannot become
markup. Only `Markup` values, such as SVG charts, are inserted unchanged. This module is independent
of runs and plans.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from unicodedata import category

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

TEXT_MAX = 600  # Maximum number of characters of an inserted text; the remainder is cut.
LONG_TEXT_MAX = 20_000  # Maximum for preformatted texts: cards, settings, configuration files.
# Invisible characters that normal text needs: line breaks, tabs, joiners and direction marks. They
# have no effect outside the enclosing HTML element.
ALLOWED_CHARACTERS = "\n\t\u200c\u200d\u200e\u200f"


@dataclass(frozen=True)
class PageTemplate:
    """Template, style sheets and script of a page.

    Each file is looked up in the folder `templates` of `package`, then in the folder `templates` of
    ptuning.reporting.
    """

    package: str
    template: str  # File name of the jinja2 template.
    styles: Sequence[str]  # File names of the style sheets.
    script: str  # File name of the script.

    def render(self, view: object, written_at: datetime | None = None) -> str:
        """Render the page from `view`, which the template reads.

        `written_at` is the time in the footer; None: the current time.
        """
        environment = template_environment(self.package)
        style = "".join(_file_text(environment, name) for name in self.styles)
        script = _file_text(environment, self.script)
        # The hashes allow only this style and this script. A browser would not run a script in an
        # inserted text, even if the text became markup by mistake.
        content_policy = (
            f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}"
        )
        return environment.get_template(self.template).render(
            view=view,
            style=Markup(style),
            script=Markup(script),
            content_policy=content_policy,
            written_at=(written_at or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        )


@cache
def template_environment(package: str) -> Environment:
    """Return the jinja2 environment that cleans and escapes all values of a package's templates."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("ptuning.reporting")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean_value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["long_text"] = _clean_long_text
    return environment


def _file_text(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _clean_value(value: object) -> object:
    """Return the text that a template inserts for a value, before escaping; None becomes empty."""
    if value is None:
        return ""
    return value if isinstance(value, Markup) else clean_text(str(value))


def _clean_long_text(text: str) -> Markup:
    return escape(clean_text(text, LONG_TEXT_MAX))


def clean_text(text: str, characters_max: int = TEXT_MAX) -> str:
    """Truncate a text and replace its invisible characters."""
    remaining = len(text) - characters_max
    visible = "".join(_visible_character(character) for character in text[:characters_max])
    return f"{visible}… ({remaining:,} more characters)" if remaining > 0 else visible


def _visible_character(character: str) -> str:
    if character.isprintable() or character in ALLOWED_CHARACTERS:
        return character
    if character < " ":
        return chr(0x2400 + ord(character))  # Unicode control picture, such as ␀ for NUL.
    return character if category(character) == "Zs" else ascii(character)[1:-1]
