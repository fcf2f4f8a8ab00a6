"""Usage sums: requests and tokens of the server's `usage_file`, by tenant, adapter, model or day.

    python examples/usage/sum_usage.py usage.jsonl --by tenant adapter --since 2026-01-01

The files of several servers can be given. A record belongs to the day in which its interval begins.
Times are compared as text: all of them are UTC in the same format, and a date without a time sorts
before the times of its day.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt.files.json_lines_log import JsonLinesLog

COUNTS = ("requests", "prompt_tokens", "virtual_tokens", "cached_tokens", "generated_tokens")
GROUPS = ("tenant", "adapter", "model", "server", "day")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="usage files; rotated files are added")
    parser.add_argument("--by", nargs="+", choices=GROUPS, default=["tenant"], metavar="GROUP")
    parser.add_argument(
        "--since", default="", metavar="TIME", help="sum intervals from this UTC time"
    )
    parser.add_argument(
        "--until", default="~", metavar="TIME", help="sum intervals before this UTC time"
    )
    flags = parser.parse_args(arguments)

    sums: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for path in flags.files:
        # The two limits are for writers only.
        for record in JsonLinesLog(path, bytes_max=1, files_max=1).read():
            if flags.since <= record["start"] < flags.until:
                sums[group_of(record, flags.by)].update({name: record[name] for name in COUNTS})

    widths = [max(map(len, column)) for column in zip(flags.by, *sums, strict=True)]
    print(*(f"{name:{width}}" for name, width in zip(flags.by, widths, strict=True)), *COUNTS)
    for group, counts in sorted(sums.items()):
        names = (f"{name:{width}}" for name, width in zip(group, widths, strict=True))
        print(*names, *(f"{counts[name]:>{len(name)}}" for name in COUNTS))


def group_of(record: dict[str, Any], groups: list[str]) -> tuple[str, ...]:
    day = record["start"][: len("2026-01-01")]
    names = {**record, "day": day, "tenant": record["tenant"] or "-"}
    return tuple(names[group] or "(base model)" for group in groups)


if __name__ == "__main__":
    main()
