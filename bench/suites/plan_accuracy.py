"""Predictions of our own server held against our own server: calibrated, predicted, measured.

Two small models of different families, and each round does all of it anew, in turns, so that a
machine that changes changes for both sides; medians are compared. The load is `preamble bench`'s.
Each line has its target and a verdict; none fails anything.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.server_process import random_checkpoint, served
from bench.suites import plan_choice
from clients.load.generator import Length, Where, Work, run
from clients.load.report import Report
from gpt.config import GPTConfig
from planning.inference.calibration_file import StepCosts
from planning.inference.estimate import Lengths, ServingSplit, Workload, estimate_serving
from planning.measurement.calibrate import Aims, calibrate

ITL_ERROR_MAX = 0.15
TTFT_ERROR_MAX = 0.25

# Another family: rotary positions, shared keys, gates; and another dtype.
MODERN = GPTConfig(
    num_layers=10,
    hidden_size=512,
    num_attention_heads=8,
    num_query_groups=2,
    ffn_hidden_size=1408,
    vocab_size=16000,
    max_position_embeddings=2048,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
    untie_embeddings_and_output_weights=True,
    dtype="float32",
)
MODELS: Mapping[str, GPTConfig] = {"gpt2-small": GPT2_SMALL, "modern": MODERN}
PARTS = (*MODELS, "choice")


@dataclass(frozen=True)
class Sizes:
    """How much is asked; a test asks for less."""

    rounds: int = 5
    seconds: float = 4.0  # For a model's steps, in each calibration.
    alone: int = 12  # Calls one after another, then
    streams: int = 8  # so many at once,
    calls: int = 96  # of which there are so many.
    prompt: tuple[int, int] = (64, 256)  # Tokens, evenly from a range.
    new: tuple[int, int] = (32, 96)
    plain: bool = True  # Whether a model is predicted from plain ones, too.

    def lengths(self, concurrency: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of prompts and answers. Few calls are all alike, or their median would be chance."""
        if concurrency > 1:
            return self.prompt, self.new
        prompt, new = (sum(one) // 2 for one in (self.prompt, self.new))
        return (prompt, prompt), (new, new)


@dataclass
class Series:
    """One figure, as it was predicted and as it was measured, round by round."""

    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        return median(self.predicted) / median(self.measured) - 1

    def line(self, name: str, target: float | None) -> str:
        told = (
            f"  {name:32} predicted {median(self.predicted):9.2f}  measured "
            f"{median(self.measured):9.2f}  ({min(self.measured):.2f} to {max(self.measured):.2f})"
            f"  {100 * self.error:+6.1f} %"
        )
        if target is None:
            return told
        met = "met" if abs(self.error) <= target else "MISSED"
        return f"{told}  target +-{100 * target:g} %: {met}"


Figures = dict[str, Series]
TARGETS = {
    "ms between tokens, alone": ITL_ERROR_MAX,
    "ms to the first token, alone": TTFT_ERROR_MAX,
    "ms between tokens, loaded": ITL_ERROR_MAX,
}


def lines(
    parts: tuple[str, ...] = (),
    sizes: Sizes = Sizes(),
    models: Mapping[str, GPTConfig] = MODELS,
) -> Iterator[str]:
    """The models that are asked for, and what is picked for one; none: all."""
    chosen = {name: network for name, network in models.items() if not parts or name in parts}
    if chosen:
        yield from _predictions(chosen, sizes)
    if "choice" in (parts or PARTS):
        yield from plan_choice.lines(MODERN)


def _predictions(chosen: Mapping[str, GPTConfig], sizes: Sizes) -> Iterator[str]:
    found: dict[str, tuple[Figures, Figures]] = {name: ({}, {}) for name in chosen}
    for turn in range(sizes.rounds):
        plain = None
        if sizes.plain:
            yield f"round {turn + 1} of {sizes.rounds}: plain models"
            dtypes = sorted({one.dtype for one in chosen.values()})
            plain = {dtype: _calibrated(None, dtype, sizes) for dtype in dtypes}
        for name, network in chosen.items():
            yield f"round {turn + 1} of {sizes.rounds}: {name}"
            with random_checkpoint(network) as model:
                costs = _calibrated(model, None, sizes)
                own = _predicted(network, sizes, costs)
                real = _measured(model, sizes)
            _note(found[name][0], own, real)
            yield _round(own, real)
            if plain is not None:
                _note(found[name][1], _predicted(network, sizes, plain[network.dtype]), real)
    for name, (own_figures, plain_figures) in found.items():
        yield f"{name}, calibrated with it, {sizes.rounds} rounds:"
        for figure, series in own_figures.items():
            yield series.line(figure, TARGETS.get(figure))
        if plain_figures:
            yield f"{name}, from plain models of other sizes:"
            for figure, series in plain_figures.items():
                yield series.line(figure, None)


def _round(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """One round's errors, for who ends the run before its last."""
    told = (f"{name} {100 * (predicted[name] / one - 1):+.0f} %" for name, one in measured.items())
    return "  " + "; ".join(told)


def _calibrated(model: Path | None, dtype: str | None, sizes: Sizes) -> StepCosts:
    plain = () if model is not None else None
    aims = Aims(model=model, dtype=dtype, seconds=sizes.seconds, plain=plain)
    return calibrate(aims, lambda line: None)


def _note(figures: Figures, predicted: Mapping[str, float], measured: Mapping[str, float]) -> None:
    for name, value in predicted.items():
        series = figures.setdefault(name, Series())
        series.predicted.append(value)
        series.measured.append(measured[name])


def _predicted(network: GPTConfig, sizes: Sizes, costs: StepCosts) -> dict[str, float]:
    def told(concurrency: int) -> "Callable[[str], float]":
        prompt, new = sizes.lengths(concurrency)
        load = Workload(_lengths(*prompt), _lengths(*new), None, concurrency)
        found = estimate_serving(
            network, network.dtype, load, ServingSplit(), costs.cluster(), costs
        )
        values = {
            "itl": found.itl_ms.mean,
            "ttft": found.ttft_ms.p50,
            "tokens": found.tokens_per_s,
        }
        return values.__getitem__

    return _figures(told(1), told(sizes.streams))


def _lengths(low: int, high: int) -> Lengths:
    return Lengths((low + high) / 2, low + 0.95 * (high - low))


def _measured(model: Path, sizes: Sizes) -> dict[str, float]:
    with served(model, limits={"prove": False}) as server:
        where = Where(server.address)

        def told(concurrency: int, calls: int) -> "Callable[[str], float]":
            prompt, new = sizes.lengths(concurrency)
            work = Work(
                concurrency=concurrency,
                requests_max=calls,
                prompt=Length("range", *prompt),
                new=Length("range", *new),
            )
            report = Report.of(run(where, work))
            assert report.itl_ms is not None and report.ttft_ms is not None
            values = {
                "itl": report.itl_ms.mean,
                "ttft": report.ttft_ms.p50,
                "tokens": report.tokens_per_s,
            }
            return values.__getitem__

        return _figures(told(1, sizes.alone), told(sizes.streams, sizes.calls))


def _figures(alone: Callable[[str], float], loaded: Callable[[str], float]) -> dict[str, float]:
    return {
        "ms between tokens, alone": alone("itl"),
        "ms to the first token, alone": alone("ttft"),
        "ms between tokens, loaded": loaded("itl"),
        "ms to the first token, loaded": loaded("ttft"),
        "tokens/s, loaded": loaded("tokens"),
    }
