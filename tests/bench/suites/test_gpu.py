"""The bench of a GPU, played small on a CPU: every row has a figure or a reason."""

import math

from bench.harness.roofline import Limit
from bench.harness.targets import PROMISES, Row, Settings
from bench.suites.gpu import Sizes, lines
from tests.support.models import CLASSIC

SMALL = Sizes(
    network=CLASSIC.with_fields(dtype="float32"),
    device="cpu",
    copy_bytes=1 << 16,
    side=32,
    single=4,
    new=4,
    requests=3,
    prompt=8,
    prefill=24,
    decodes=2,
    decode_prompt=6,
)


def test_every_row_has_its_figure_or_says_what_is_missing() -> None:
    items = list(lines(2, SMALL))
    rows = {one.promise.name: one for one in items if isinstance(one, Row)}
    assert sorted(rows) == sorted(name for name in PROMISES if name.startswith("gpu/"))
    assert [one.name for one in items if isinstance(one, Limit)] == [
        "copy bandwidth",
        "float32 products",
    ]
    assert sum(isinstance(one, Settings) for one in items) == 1
    for name in ("gpu/decode", "gpu/prefill"):
        assert math.isfinite(rows[name].value) and len(rows[name].samples) == 2
        assert all(len(some) == 2 for some in rows[name].samples.values())
    assert "transformers" in rows["gpu/batch"].missing
    for name in ("gpu/fp8-prefill", "gpu/fp8-decode"):
        assert "ConfigError" in rows[name].missing and "cpu" in rows[name].missing
