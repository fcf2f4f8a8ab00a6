"""HTML that is built from elements, so that a text can only ever be a text.

Whatever is no `Html` is escaped, cut to a length, and freed of what could not be seen or would turn
the text around it; there is no other way in. Knows no page.
"""

from html import escape
from unicodedata import category

TEXT_MAX = 600  # Characters of one text that are shown.
VOID = ("meta", "br", "link")
# Characters that join or order letters in honest text, and end with the element that they are in.
KEPT = "\n\t\u200c\u200d\u200e\u200f"


class Html(str):
    """Markup, to be taken as it is."""

    __slots__ = ()


Child = Html | str | None


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """`class_` and `for_` lose their line, other lines become dashes; True is a bare attribute."""
    said = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escape(cleaned(str(value)))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    return Html("".join(map(_child, children)))


def _child(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Html) else escape(cleaned(child))


def cleaned(text: str, most: int = TEXT_MAX) -> str:
    """What a person can see of it, and how much more there is."""
    left = len(text) - most
    seen = "".join(_seen(character) for character in text[:most])
    return f"{seen}… ({left:,} more characters)" if left > 0 else seen


def _seen(character: str) -> str:
    if character.isprintable() or character in KEPT:
        return character
    if character < " ":
        return chr(0x2400 + ord(character))  # Its picture: NUL is ␀.
    return character if category(character) == "Zs" else ascii(character)[1:-1]
