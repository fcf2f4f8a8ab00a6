"""The colours of a page's style sheet, and their contrast."""

import re
from collections.abc import Mapping
from importlib.resources import files

STYLE = files("ptuning.reporting").joinpath("templates/report.css").read_text("utf-8")


def contrast(colour: str, other: str) -> float:
    """WCAG's contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(colour), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def colours(style: str) -> Mapping[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", style))
