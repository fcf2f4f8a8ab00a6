"""pareto.html: a plan on one page that needs nothing else, for a person to look at and look up.

The verdict first, then why, then all candidates as a picture whose every point tells its whole
configuration, then what fills the memory, and tables. It loads nothing and forbids that to itself;
without its script all but reading points, sorting and filtering works. Knows no files but its own.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from planning.figures import (
    ACCEPTABLE,
    HEADLINE_MAX,
    LEDGER,
    Rejection,
    cell,
    counts,
    known,
    label,
    name_of,
    order,
    rejections,
    say,
    settings_of,
    shown,
    size,
)
from planning.memory_ledger import FITS_SHARE, Ledger
from planning.output.pareto import View, view
from planning.output.svg_scatter import draw, group_colours
from planning.plan import Plan, Row
from ptuning.reporting.markup import TEXT_MAX, Child, Html, cleaned, joined, tag

TABLE_MAX = 200  # Candidates in the table; all are in candidates.csv.
FIGURES_MAX = 8  # Columns of it.
BARS_MAX = 8
BARS_OVER = 2  # Of them, at most, of what does not fit.
ALIKE = 0.03  # Of the memory, that two bars' parts differ by.
OVER = 1.25  # Of the largest memory, that a bar shows; what is more is told in numbers.
REASONS_MAX = 20
YAML_MAX = 20_000  # Characters.

ICON = Html(
    '<svg viewBox="0 0 32 32" width="28" height="28" aria-hidden="true">'
    '<rect width="32" height="32" rx="7" fill="#0f6b5c"/>'
    '<path d="M7 23C9 13 14 9 25 8" fill="none" stroke="#fff" stroke-width="2.5"/>'
    '<g fill="#fff"><circle cx="13" cy="21" r="2" opacity=".55"/>'
    '<circle cx="20" cy="22" r="2" opacity=".55"/><circle cx="19" cy="15" r="2" opacity=".75"/>'
    '<circle cx="12.5" cy="12.4" r="3"/></g></svg>'
)


def page(plan: Plan, written: datetime | None = None) -> str:
    """The whole of pareto.html."""
    style = Html(_asset("ptuning.reporting", "report.css") + _asset("planning.output", "page.css"))
    script = Html(_asset("planning.output", "page.js"))
    # Hashes, so that nothing else could run here even if a text were taken for markup.
    rules = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=rules),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{plan.title}: plan"),
        tag("style", style),
    )
    seen = view(plan)
    main = tag(
        "main",
        _verdict(plan),
        _why(plan),
        _picture(plan, seen) if seen is not None else None,
        _memory(plan),
        _candidates(plan, seen),
        _put_aside(plan),
        _start(plan),
    )
    when = (written or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    footer = tag(
        "footer", f"Written by preamble plan on {when}. This file is complete: it loads nothing."
    )
    body = tag("body", _header(plan), main, footer, tag("script", script))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


@cache
def _asset(folder: str, name: str) -> str:
    return files(folder).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _isolated(text: str) -> Html:
    """Letters that are written from the right stay on their side."""
    return tag("bdi", text)


def _header(plan: Plan) -> Html:
    said = plan.asked[0] if plan.asked else plan.objective
    names = tag(
        "div",
        tag("h1", _isolated(f"{plan.title[:1].upper()}{plan.title[1:]} plan")),
        tag("p", _isolated(said), class_="hint"),
    )
    best = plan.best
    if best is None:
        return tag("header", ICON, names, tag("p", "Nothing fits", class_="pill bad"))
    # Its note is too long for here.
    trust = str(replace(best.trust, note="")) if best.trust is not None else "recommended"
    return tag("header", ICON, names, tag("p", trust, class_="pill good"))


def _verdict(plan: Plan) -> Html:
    best = plan.best
    if best is None:
        first = plan.binding[0] if plan.binding else "Every candidate was rejected."
        said = [tag("p", "No configuration fits."), tag("p", _isolated(first))]
        return tag("section", *said, class_="card verdict bad", aria_label="Verdict")
    said = [tag("p", _isolated(best.name))]
    if best.settings:
        said.append(tag("p", _isolated(" · ".join(settings_of(best))), class_="settings"))
    if best.trust is not None:
        said.append(tag("p", _isolated(f"All figures: {best.trust}."), class_="settings"))
    tiles = (_tile(best, figure) for figure in order(plan, [best])[:HEADLINE_MAX])
    return tag(
        "section",
        *said,
        tag("dl", *tiles, class_="figures"),
        class_="card verdict good",
        aria_label="Verdict",
    )


def _tile(row: Row, figure: str) -> Html:
    value = known(row, figure)
    assert value is not None  # `order` gives no others.
    hint = None
    predicted = row.figures.get(figure)
    if figure in row.measured:
        hint = "measured"
        if predicted is not None:
            off = 100 * (predicted / value - 1) if value else 0.0
            hint += f"; predicted {say(figure, predicted)}, {off:+.0f} %"
    more = tag("dd", hint, class_="hint") if hint else None
    return tag("div", tag("dt", label(figure)), tag("dd", say(figure, value)), more)


def _why(plan: Plan) -> Html | None:
    advice = "What would fit" if plan.best is None else "Worth knowing"
    told = (("What binds", plan.binding), ("Why not others", plan.why_not), (advice, plan.advice))
    parts = [
        tag(
            "div",
            tag("h2", name),
            tag("ul", *(tag("li", _isolated(text)) for text in texts)),
        )
        for name, texts in told
        if texts
    ]
    return tag("section", *parts, class_="card why", aria_label="Why") if parts else None


def _picture(plan: Plan, seen: View) -> Html:
    best = plan.best
    panel = tag(
        "aside",
        *(_panel(plan, best) if best is not None else ()),
        class_="panel",
        aria_live="polite",
    )
    hint = "Point at a candidate, or use the arrow keys; a click keeps it."
    if seen.left_out:
        hint += f" {seen.left_out:,} that others beat by far lie outside."
    drawn = tag(
        "div",
        tag("div", draw(plan, seen), class_="wide"),
        _legend(plan, seen),
        tag("p", hint, class_="hint scripted", hidden=True),
    )
    return tag(
        "section",
        tag("h2", _isolated(f"{plan.y.label} over {plan.x.label}")),
        tag("div", drawn, panel, class_="picture"),
        class_="card",
    )


def _panel(plan: Plan, row: Row) -> Iterator[Html]:
    """As page.js writes it for any other candidate."""
    standing = "recommended" if row.standing == "best" else row.standing
    trust = str(row.trust) if row.trust is not None else ""
    yield tag("h3", _isolated(row.name))
    yield tag("p", " · ".join(filter(None, (standing, row.group, trust))), class_="hint")
    if row.reason:
        yield tag("p", row.reason, class_="reason")
    yield tag("dl", *(_pair(name_of(name), cell(value)) for name, value in row.settings.items()))
    yield tag("dl", *(_pair(label(figure), shown(row, figure)) for figure in order(plan, [row])))


def _pair(name: str, value: str) -> Html:
    return joined(tag("dt", name), tag("dd", value))


def _legend(plan: Plan, seen: View) -> Html:
    line = '<line x1="0" y1="5" x2="20" y2="5" class="{0}"/>'
    dot = '<circle cx="10" cy="5" r="{1}" class="{0}"/>'
    colours = group_colours(seen)
    entries = [
        (line.format(kind) + dot.format(kind.split()[0], 3.5), group or "not beaten by any other")
        for group, kind in colours.items()
    ]
    standings = {row.standing for row in seen.rows}
    if "best" in standings:
        entries.append((dot.format("ring", 4.5), "recommended, with its error bar"))
    ahead = sum(map(len, seen.fronts.values()))
    if len(seen.rows) > ahead:
        entries.append((dot.format("c5 faint", 3), "beaten"))
    if "tight" in standings:
        entries.append((dot.format("c5 tight", 3.5), "tight in memory"))
    if standings & {"rejected", "failed"}:
        entries.append(('<path class="no" d="M7 2l6 6m0-6l-6 6"/>', "rejected"))
    if any(axis.limit is not None for axis in (plan.x, plan.y)):
        entries.append((line.format("limit"), "limit, less its margin"))
    items = (
        tag("li", tag("svg", Html(drawn), viewBox="0 0 20 10", aria_hidden="true"), text)
        for drawn, text in entries
    )
    return tag("ul", *items, class_="legend")


def _memory(plan: Plan) -> Html | None:
    """The recommended one's device and others' that differ from it, as bars of what is in them."""
    ledgers = _alike_once([row for row in plan.rows if row.standing in ACCEPTABLE])
    # Some of those that were put aside for it show how much was missing.
    over = _alike_once([row for row in plan.rows if row.memory and row.memory.verdict == "over"])
    ledgers = ledgers[: BARS_MAX - len(over[:BARS_OVER])] + over[:BARS_OVER]
    if not ledgers:
        return None
    capacity = max(memory.capacity for _, memory in ledgers)
    most = min(max(capacity, *(memory.total for _, memory in ledgers)), OVER * capacity)
    lines = [
        tag(
            "tr",
            tag("th", _isolated(row.name), scope="row"),
            tag("td", _bar(memory, most)),
            tag("td", f"{size(memory.total)} of {size(memory.capacity)}"),
            class_="ours" if row.standing == "best" else None,
        )
        for row, memory in ledgers
    ]
    used = [
        (place, name)
        for place, name in enumerate(LEDGER)
        if any(getattr(memory, name) for _, memory in ledgers)
    ]
    legend = (
        tag(
            "li",
            tag(
                "svg",
                Html(f'<rect class="m{place}" x="4" width="12" height="10" rx="2"/>'),
                viewBox="0 0 20 10",
                aria_hidden="true",
            ),
            name_of(name),
        )
        for place, name in used
    )
    return tag(
        "section",
        tag("h2", "What fills the fullest device"),
        tag("div", tag("table", tag("tbody", *lines), class_="memory"), class_="wide"),
        tag("ul", *legend, class_="legend"),
        tag(
            "p",
            f"A plan fits up to {100 * FITS_SHARE:.0f} % of the memory, the dashed line: "
            "allocators fragment, and libraries take what nobody counted.",
            class_="hint",
        ),
        class_="card",
    )


def _alike_once(rows: Sequence[Row]) -> list[tuple[Row, Ledger]]:
    """Of those whose memory looks the same, the first."""
    found: dict[tuple[int, ...], tuple[Row, Ledger]] = {}
    for row in rows:
        if row.memory is not None:
            parts = (getattr(row.memory, name) / row.memory.capacity for name in LEDGER)
            found.setdefault(tuple(round(part / ALIKE) for part in parts), (row, row.memory))
    return list(found.values())


def _bar(memory: Ledger, most: float) -> Html:
    rects, start = [], 0.0
    scale = 1000 / most
    rects.append(f'<rect class="well" width="{memory.capacity * scale:.1f}" height="14"/>')
    for place, name in enumerate(LEDGER):
        width = getattr(memory, name) * scale
        if width > 0:
            rects.append(
                f'<rect class="m{place}" x="{start:.1f}" width="{max(1.0, width - 2):.1f}" '
                f'height="14"><title>{name_of(name)} {size(getattr(memory, name))}</title></rect>'
            )
        start += width
    for share, kind in ((FITS_SHARE, "fits"), (1.0, "full")):
        x = memory.capacity * share * scale
        rects.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="-3" y2="17"/>')
    told = f"{size(memory.total)} of {size(memory.capacity)}"
    return Html(
        f'<svg viewBox="0 -3 1001 20" preserveAspectRatio="none" role="img" aria-label="{told}">'
        f"{''.join(rects)}</svg>"
    )


def _candidates(plan: Plan, seen: View | None) -> Html | None:
    rows = [row for row in plan.rows if row.standing in ACCEPTABLE][:TABLE_MAX]
    if not rows:
        return None
    figures = order(plan, rows)[:FIGURES_MAX]
    several = len({row.group for row in rows}) > 1
    places = {id(row): place for place, row in enumerate(seen.rows)} if seen is not None else {}
    head = [
        "Candidate",
        *(["Group"] if several else []),
        *map(label, figures),
        "Standing",
        "Source",
    ]
    lines = [
        tag(
            "tr",
            tag("th", _isolated(row.name), scope="row"),
            tag("td", row.group) if several else None,
            *(_figure(row, figure) for figure in figures),
            tag("td", {"best": "fits"}.get(row.standing, row.standing)),
            tag("td", row.trust.source if row.trust is not None else ""),
            class_="ours" if row.standing == "best" else None,
            data_place=places.get(id(row)),
        )
        for row in rows
    ]
    many = counts(plan)
    total = many["fits"] + many["tight"]
    hint = f"The first {len(rows):,} of {total:,}; all are in candidates.csv."
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head))),
        tag("tbody", *lines),
        class_="candidates",
    )
    return tag(
        "section",
        tag("h2", "Candidates"),
        tag(
            "p",
            tag("input", type="search", placeholder="Filter", aria_label="Filter candidates"),
            class_="scripted",
            hidden=True,
        ),
        tag("div", table, class_="wide"),
        tag("p", hint, class_="hint") if total > len(rows) else None,
        class_="card",
    )


def _figure(row: Row, figure: str) -> Html:
    value = known(row, figure)
    if value is None:
        return tag("td", "–")
    hint = tag("span", " measured", class_="hint") if figure in row.measured else None
    return tag("td", say(figure, value), hint, data_value=f"{value:.9g}")


def _put_aside(plan: Plan) -> Html | None:
    made = [
        (name, rejections(plan.rows, standing))
        for name, standing in (("Rejected", "rejected"), ("Failed", "failed"))
    ]
    parts = [_reasons(name, found) for name, found in made if found]
    return tag("section", *parts, class_="card aside") if parts else None


def _reasons(name: str, found: Sequence[Rejection]) -> Html:
    count = sum(one.count for one in found)
    lines = [
        tag(
            "tr",
            tag("td", f"{one.count:,}"),
            tag("td", _isolated(one.example)),
            tag("td", _isolated(one.reason or "no reason was given")),
        )
        for one in found[:REASONS_MAX]
    ]
    names = ("How many", "Such as", "Why")
    head = tag("thead", tag("tr", *(tag("th", one, scope="col") for one in names)))
    table = tag("table", head, tag("tbody", *lines))
    return tag("div", tag("h2", f"{name}: {count:,}"), tag("div", table, class_="wide"))


def _start(plan: Plan) -> Html | None:
    asked = [tag("li", _isolated(text)) for text in plan.asked]
    parts: list[Child] = []
    if plan.command:
        parts += [tag("h2", "Start it"), _pre(plan.command)]
    if plan.settings_yaml:
        parts.append(tag("details", tag("summary", "The settings file"), _pre(plan.settings_yaml)))
    if asked:
        what = f"What was asked, for {plan.objective}"
        parts += [tag("h2", what), tag("ul", *asked)]
    return tag("section", *parts, class_="card start") if parts else None


def _pre(text: str) -> Html:
    """What is longer than a text may be, which is cut piece by piece: to a length of its own."""
    text = cleaned(text, YAML_MAX)
    pieces = (text[start : start + TEXT_MAX] for start in range(0, len(text), TEXT_MAX))
    return tag("pre", *pieces, tabindex=0)
