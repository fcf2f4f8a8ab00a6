"""Plan accuracy benchmark: predicted vs measured latency and throughput of our server.

Two small models of different families are calibrated, predicted and measured again in each round,
so that a change in the speed of the machine affects predictions and measurements alike. Medians are
compared. The load comes from the load generator of `preamble bench`. A missed target is reported as
a verdict and does not change the exit status.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.server_process import running_server, saved_random_checkpoint
from bench.suites import plan_choice
from clients.load.generator import LengthSampler, LoadSpec, ServerEndpoint, run_load
from clients.load.report import LoadReport
from gpt.config import GPTConfig
from planning.inference.calibration_file import Calibration
from planning.inference.estimate import LengthDistribution, ServingSplit, Workload, estimate_serving
from planning.measurement.calibrate import CalibrationOptions, calibrate

# Targets: largest relative errors.
ITL_ERROR_MAX = 0.15
TTFT_ERROR_MAX = 0.25

# Llama-like: rotary positions, grouped-query attention, gated MLP; fp32 instead of bf16.
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
class PlanAccuracySizes:
    """Sizes of calibrations and loads; tests use smaller ones."""

    rounds: int = 5
    seconds: float = 4.0  # Measuring time of model steps in each calibration.
    single_calls: int = 12  # Calls of the load with one call at a time.
    streams: int = 8  # Concurrent calls of the second load.
    calls: int = 96  # Total calls of the second load.
    prompt_tokens: tuple[int, int] = (64, 256)  # Uniform between minimum and maximum.
    new_tokens: tuple[int, int] = (32, 96)
    predicts_from_reference: bool = True  # Whether to predict from reference models, too.

    def lengths(self, concurrency: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the length ranges of prompts and answers.

        The load with one call at a time has few calls, and their median would depend on the drawn
        lengths. All calls of this load therefore have the mean length.
        """
        if concurrency > 1:
            return self.prompt_tokens, self.new_tokens
        mean_prompt = sum(self.prompt_tokens) // 2
        mean_answer = sum(self.new_tokens) // 2
        return (mean_prompt, mean_prompt), (mean_answer, mean_answer)


@dataclass
class FigureSeries:
    """The predicted and measured values of one figure, one per round."""

    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        return median(self.predicted) / median(self.measured) - 1

    def format_line(self, name: str, target: float | None) -> str:
        text = (
            f"  {name:32} predicted {median(self.predicted):9.2f}  measured "
            f"{median(self.measured):9.2f}  ({min(self.measured):.2f} to {max(self.measured):.2f})"
            f"  {100 * self.error:+6.1f} %"
        )
        if target is None:
            return text
        verdict = "met" if abs(self.error) <= target else "MISSED"
        return f"{text}  target +-{100 * target:g} %: {verdict}"


SeriesByFigure = dict[str, FigureSeries]
# Maps a figure to its largest accepted relative error. "alone": one call at a time.
TARGETS = {
    "ms between tokens, alone": ITL_ERROR_MAX,
    "ms to the first token, alone": TTFT_ERROR_MAX,
    "ms between tokens, loaded": ITL_ERROR_MAX,
}


def run_suite(
    parts: tuple[str, ...] = (),
    sizes: PlanAccuracySizes = PlanAccuracySizes(),
    models: Mapping[str, GPTConfig] = MODELS,
) -> Iterator[str]:
    """Run the selected models and the plan-choice part, or all if none is selected."""
    selected = {name: network for name, network in models.items() if not parts or name in parts}
    if selected:
        yield from _compare_predictions(selected, sizes)
    if "choice" in (parts or PARTS):
        yield from plan_choice.run_suite(MODERN)


def _compare_predictions(
    selected: Mapping[str, GPTConfig], sizes: PlanAccuracySizes
) -> Iterator[str]:
    # For each model: the figures predicted from a calibration with the model itself, and the
    # figures predicted from a calibration with reference models.
    series_by_model: dict[str, tuple[SeriesByFigure, SeriesByFigure]] = {
        name: ({}, {}) for name in selected
    }
    for round_index in range(sizes.rounds):
        reference_costs = None
        if sizes.predicts_from_reference:
            yield f"round {round_index + 1} of {sizes.rounds}: reference models"
            dtypes = sorted({config.dtype for config in selected.values()})
            reference_costs = {dtype: _calibrate(None, dtype, sizes) for dtype in dtypes}
        for name, network in selected.items():
            yield f"round {round_index + 1} of {sizes.rounds}: {name}"
            with saved_random_checkpoint(network) as model:
                costs = _calibrate(model, None, sizes)
                predicted = _predict(network, sizes, costs)
                measured = _measure(model, sizes)
            _record_figures(series_by_model[name][0], predicted, measured)
            yield _format_round(predicted, measured)
            if reference_costs is not None:
                _record_figures(
                    series_by_model[name][1],
                    _predict(network, sizes, reference_costs[network.dtype]),
                    measured,
                )
    for name, (model_figures, reference_figures) in series_by_model.items():
        yield f"{name}, calibrated with this model, {sizes.rounds} rounds:"
        for figure, series in model_figures.items():
            yield series.format_line(figure, TARGETS.get(figure))
        if reference_figures:
            yield f"{name}, calibrated with reference models of other sizes:"
            for figure, series in reference_figures.items():
                yield series.format_line(figure, None)


def _format_round(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Format the errors of one round; an interrupted run has at least these lines."""
    errors = (
        f"{name} {100 * (predicted[name] / figure - 1):+.0f} %" for name, figure in measured.items()
    )
    return "  " + "; ".join(errors)


def _calibrate(model: Path | None, dtype: str | None, sizes: PlanAccuracySizes) -> Calibration:
    # (): calibrate with `model` only. None: calibrate with the default reference models.
    reference_models = () if model is not None else None
    options = CalibrationOptions(
        model=model, dtype=dtype, seconds=sizes.seconds, reference_models=reference_models
    )
    return calibrate(options, lambda line: None)


def _record_figures(
    figures: SeriesByFigure, predicted: Mapping[str, float], measured: Mapping[str, float]
) -> None:
    for name, figure in predicted.items():
        series = figures.setdefault(name, FigureSeries())
        series.predicted.append(figure)
        series.measured.append(measured[name])


def _predict(network: GPTConfig, sizes: PlanAccuracySizes, costs: Calibration) -> dict[str, float]:
    def predict_figures(concurrency: int) -> dict[str, float]:
        prompt, new = sizes.lengths(concurrency)
        workload = Workload(_lengths(*prompt), _lengths(*new), None, concurrency)
        estimate = estimate_serving(
            network, network.dtype, workload, ServingSplit(), costs.as_cluster(), costs
        )
        return {
            "itl": estimate.itl_ms.mean,
            "ttft": estimate.ttft_ms.p50,
            "tokens": estimate.tokens_per_s,
        }

    return _collect_figures(predict_figures(1), predict_figures(sizes.streams))


def _lengths(low: int, high: int) -> LengthDistribution:
    return LengthDistribution((low + high) / 2, low + 0.95 * (high - low))


def _measure(model: Path, sizes: PlanAccuracySizes) -> dict[str, float]:
    with running_server(model, settings={"prove": False}) as server:
        endpoint = ServerEndpoint(server.address)

        def measure_figures(concurrency: int, calls: int) -> dict[str, float]:
            prompt, new = sizes.lengths(concurrency)
            workload = LoadSpec(
                concurrency=concurrency,
                requests_max=calls,
                prompt_length=LengthSampler("range", *prompt),
                output_length=LengthSampler("range", *new),
            )
            report = LoadReport.from_run(run_load(endpoint, workload))
            assert report.itl_ms is not None and report.ttft_ms is not None
            return {
                "itl": report.itl_ms.mean,
                "ttft": report.ttft_ms.p50,
                "tokens": report.tokens_per_s,
            }

        return _collect_figures(
            measure_figures(1, sizes.single_calls), measure_figures(sizes.streams, sizes.calls)
        )


def _collect_figures(single: Mapping[str, float], loaded: Mapping[str, float]) -> dict[str, float]:
    return {
        "ms between tokens, alone": single["itl"],
        "ms to the first token, alone": single["ttft"],
        "ms between tokens, loaded": loaded["itl"],
        "ms to the first token, loaded": loaded["ttft"],
        "tokens/s, loaded": loaded["tokens"],
    }
