"""Validation of cost models: predicts every published table, and reports errors and targets.

The targets are the constants below. Memory verdicts are compared with runs that fitted or ran out
of memory. The predictions come from the functions that `preamble plan estimate` uses; the published
numbers are in `planning/published/*.yaml`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpt.costs.inference import parameter_count
from gpt.costs.training import forward_flops, recompute_flops, step_flops
from planning.hardware import GIB, Cluster, find_device
from planning.published import inference_runs, training_runs
from planning.published.static_batch import static_memory
from planning.published.training_runs import PublishedRun, PublishedTable
from planning.training.efficiency import software_of_device
from planning.training.estimate import estimate_training, layer_seconds
from planning.training.search import SearchSpace, search_training

# Targets: the largest accepted relative errors of predictions.
TRAINING_MEAN_MAX = 0.05
TRAINING_WORST_MAX = 0.12
INFERENCE_MEAN_MAX = 0.07
CLOSED_FORM_MAX = 0.005  # Worst error of the memory formulas of training.
MEMORY_MEAN_MAX = 0.03  # Mean error of the memory of static batches.
# Target: largest mean relative difference in predicted step time between the vendor's split and the
# planner's fastest split.
RANKING_MAX = 0.05
# Target: largest error in percentage points, for MFU, HFU, and activation memory as a percentage of
# the memory with tensor parallelism alone.
PERCENT_POINTS_MAX = 0.3
# ZeRO-3 without model parallelism: the speed of its kernels relative to Megatron's, and the
# fraction of the network bandwidth that it reaches. Both are fitted to the three published ZeRO-3
# rows.
ZERO3_COMPUTE_EFFICIENCY = 0.62
ZERO3_NETWORK_EFFICIENCY = 0.70
NAME_WIDTH = 59  # Columns of a table's name in the report.


@dataclass(frozen=True)
class PredictedRow:
    """A published number and its prediction."""

    name: str
    published: float
    predicted: float
    unit: str = "s"

    @property
    def error(self) -> float:
        """The signed relative error: 0.05 means that the prediction is 5 % too high."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class ValidationTable:
    """A published table with its predictions and its targets."""

    name: str
    source: str
    rows: Sequence[PredictedRow]
    mean_max: float | None = None  # Target of the mean error; None: no target.
    worst_max: float | None = None  # Target of the worst error; None: no target.
    absolute: bool = False  # Whether errors and targets are in the unit of the rows, not relative.
    is_total: bool = False  # Whether the rows also occur in other tables.

    def error(self, row: PredictedRow) -> float:
        return row.predicted - row.published if self.absolute else row.error

    @property
    def mean(self) -> float:
        return sum(abs(self.error(row)) for row in self.rows) / len(self.rows)

    @property
    def worst(self) -> float:
        return max(abs(self.error(row)) for row in self.rows)

    @property
    def is_within_targets(self) -> bool:
        is_mean_accepted = self.mean_max is None or self.mean <= self.mean_max
        is_worst_accepted = self.worst_max is None or self.worst <= self.worst_max
        return is_mean_accepted and is_worst_accepted


@dataclass(frozen=True)
class MemoryVerdicts:
    """Published configurations that fitted or ran out of memory, and the wrong predictions."""

    name: str
    source: str
    count: int
    wrong: Sequence[str]  # A description of each wrong prediction.
    wrong_max: int = 0  # Accepted number of wrong predictions.

    @property
    def is_within_targets(self) -> bool:
        return len(self.wrong) <= self.wrong_max


@dataclass(frozen=True)
class ValidationReport:
    tables: Sequence[ValidationTable]
    verdicts: Sequence[MemoryVerdicts]

    @property
    def is_within_targets(self) -> bool:
        return all(table.is_within_targets for table in self.tables) and all(
            verdicts.is_within_targets for verdicts in self.verdicts
        )

    def figures(self) -> Mapping[str, object]:
        """Return the report as JSON values."""
        return {
            "good": self.is_within_targets,
            "tables": [_table_figures(table) for table in self.tables],
            "verdicts": [
                {
                    "name": verdicts.name,
                    "source": verdicts.source,
                    "configurations": verdicts.count,
                    "wrong": list(verdicts.wrong),
                    "wrong_max": verdicts.wrong_max,
                    "good": verdicts.is_within_targets,
                }
                for verdicts in self.verdicts
            ],
        }

    def text(self, rows: bool = False) -> str:
        """Return one line per table, preceded by all rows of the tables if `rows` is set."""
        lines = []
        if rows:
            row_tables = [table for table in self.tables if not table.is_total]
            lines = [line for table in row_tables for line in _table_lines(table)]
        lines += [_summary(table) for table in self.tables]
        for verdicts in self.verdicts:
            mark = "ok" if verdicts.is_within_targets else "OUTSIDE"
            right_count = verdicts.count - len(verdicts.wrong)
            lines += [
                f"{verdicts.name:{NAME_WIDTH}} {right_count} of {verdicts.count} right  {mark}"
            ]
            lines += [f"  wrong: {description}" for description in verdicts.wrong]
        lines += [
            "all tables are within their targets"
            if self.is_within_targets
            else "some tables are outside of their targets"
        ]
        return "\n".join(lines)


def _table_figures(table: ValidationTable) -> Mapping[str, object]:
    return {
        "name": table.name,
        "source": table.source,
        "error_unit": table.rows[0].unit if table.absolute else "share",
        "mean_error": table.mean,
        "worst_error": table.worst,
        "mean_error_max": table.mean_max,
        "worst_error_max": table.worst_max,
        "good": table.is_within_targets,
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                "published": row.published,
                "predicted": row.predicted,
                "error": table.error(row),
            }
            for row in table.rows
        ],
    }


def _table_lines(table: ValidationTable) -> list[str]:
    lines = [f"{table.name} [{table.source}]"]
    width = max(len(row.name) for row in table.rows)
    for row in table.rows:
        lines.append(
            f"  {row.name:{width}}  published {row.published:9.4g}  predicted {row.predicted:9.4g} "
            f"{row.unit:5} {_format_error(table, table.error(row), '+')}"
        )
    return [*lines, f"  {_totals(table)}", ""]


def _summary(table: ValidationTable) -> str:
    return f"{table.name:{NAME_WIDTH}} {_totals(table)}"


def _totals(table: ValidationTable) -> str:
    errors_text = (
        f"mean {_format_error(table, table.mean)}, worst {_format_error(table, table.worst)}"
    )
    targets = [
        f"{name} {_format_error(table, value).strip()}"
        for name, value in (("mean", table.mean_max), ("worst", table.worst_max))
        if value is not None
    ]
    if not targets:
        return f"{errors_text}  (for information)"
    verdict = "ok" if table.is_within_targets else "OUTSIDE"
    return f"{errors_text}  {verdict} (at most {', '.join(targets)})"


def _format_error(table: ValidationTable, value: float, sign: str = "") -> str:
    if table.absolute:
        return f"{value:{sign}7.2f} {table.rows[0].unit}"
    return f"{100 * value:{sign}5.1f} %"


def validate_tables() -> ValidationReport:
    megatron_tables = [table for table in training_runs.run_tables() if table.kind != "zero3"]
    training = [_training_table(table) for table in megatron_tables]
    all_runs = ValidationTable(
        "training, all runs",
        "the tables above",
        [row for table in training for row in table.rows],
        TRAINING_MEAN_MAX,
        TRAINING_WORST_MAX,
        is_total=True,
    )
    tables = [
        *training,
        all_runs,
        *_zero3_tables(),
        _layer_table(),
        *_closed_forms(),
        _ranking_table(),
    ]
    return ValidationReport(
        [*tables, *_inference_tables()], [_training_memory_verdicts(), _inference_memory_verdicts()]
    )


def _training_table(table: PublishedTable) -> ValidationTable:
    rows = [PredictedRow(run.name, run.seconds, _estimate_s(run), "s") for run in table.runs]
    # Values read from a plot have an error of 5 %, so their mean error has no target.
    mean = TRAINING_MEAN_MAX if table.kind == "runs" else None
    return ValidationTable(f"training: {table.name}", table.source, rows, mean, TRAINING_WORST_MAX)


def _estimate_s(run: PublishedRun) -> float:
    return estimate_training(run.job, run.split, run.cluster).iteration_s


def _zero3_tables() -> Iterator[ValidationTable]:
    """Yield the tables of ZeRO-3, which the planner does not choose.

    With ZeRO-3, every GPU computes all layers and gathers their weights twice during the step.
    """
    for table in training_runs.run_tables():
        if table.kind != "zero3":
            continue
        rows = []
        for run in table.runs:
            device = run.cluster.device
            forward_s, backward_s = layer_seconds(
                run.job, run.split, run.cluster, software_of_device(device)
            )
            computing_s = (
                run.job.model.num_layers * (forward_s + backward_s) / ZERO3_COMPUTE_EFFICIENCY
            )
            # Two all-gathers of the weights and one reduce-scatter of the gradients, with 2 bytes
            # per parameter.
            bytes_sent = 3 * 2 * parameter_count(run.job.model)
            sending_s = bytes_sent / (device.network_bytes_per_s * ZERO3_NETWORK_EFFICIENCY)
            rows.append(PredictedRow(run.name, run.seconds, max(computing_s, sending_s)))
        yield ValidationTable(
            f"training: {table.name}", table.source, rows, None, TRAINING_WORST_MAX
        )


def _layer_table() -> ValidationTable:
    rows = []
    for layer in training_runs.layer_times():
        software_stack = software_of_device(layer.cluster.device)
        forward_s, backward_s = layer_seconds(layer.job, layer.split, layer.cluster, software_stack)
        rows.append(
            PredictedRow(f"{layer.name}, forward", layer.forward_ms, forward_s * 1000, "ms")
        )
        rows.append(
            PredictedRow(f"{layer.name}, backward", layer.backward_ms, backward_s * 1000, "ms")
        )
    return ValidationTable(
        "one layer of 22B", "K22 table 4", rows, TRAINING_MEAN_MAX, TRAINING_WORST_MAX
    )


def _closed_forms() -> Iterator[ValidationTable]:
    """Yield the tables of memory, MFU and HFU, and numbers of parameters."""
    activation_rows = []
    share_rows = []
    state_rows = []
    device = find_device("a100-80g")
    for activations in training_runs.published_activations():
        activation_gib = []
        for (name, split), gib in zip(
            activations.splits.items(), activations.activation_gib, strict=True
        ):
            memory = estimate_training(activations.job, split, Cluster(device, split.gpus)).memory
            activation_gib.append(memory.activations / GIB)
            activation_rows.append(
                PredictedRow(f"{activations.name} {name}", gib, activation_gib[-1], "GiB")
            )
        for name, percent, gib in zip(
            activations.splits, activations.percent, activation_gib, strict=True
        ):
            share_rows.append(
                PredictedRow(
                    f"{activations.name} {name}", percent, 100 * gib / activation_gib[0], "%"
                )
            )
        split = activations.splits["TP"]
        model = activations.job.model
        non_embedding_parameters = parameter_count(model) - model.hidden_size * (
            model.vocab_size + model.max_position_embeddings
        )
        # The source counts 18 bytes for each parameter outside of the embeddings.
        states_gib = 18 * non_embedding_parameters / (split.tp * split.pp) / GIB
        state_rows.append(
            PredictedRow(f"{activations.name} states", activations.states_gib, states_gib, "GiB")
        )
    source = "K22 section 4 and figures 1 and 7"
    yield ValidationTable(
        "activations of the first stage",
        source,
        [*activation_rows, *state_rows],
        None,
        CLOSED_FORM_MAX,
    )
    yield ValidationTable(
        "activations relative to TP alone",
        source,
        share_rows,
        None,
        PERCENT_POINTS_MAX,
        absolute=True,
    )
    yield _utilization_table()
    yield ValidationTable(
        "parameters", "N21 table 1", list(_parameter_rows()), None, 0.05, absolute=True
    )


def _utilization_table() -> ValidationTable:
    """Compare MFU and HFU, to check that FLOPs are counted as in the literature."""
    rows = []
    for table in training_runs.run_tables():
        for run in table.runs:
            flops = forward_flops(run.job.model, run.job.global_batch, run.job.sequence)
            model_flops = step_flops(flops, run.job.trainable)
            executed_flops = model_flops + recompute_flops(flops, run.split.recompute)
            flops_per_percent = run.seconds * run.split.gpus * run.cluster.device.flops / 100
            if run.mfu is not None:
                rows.append(
                    PredictedRow(f"{run.name}: MFU", run.mfu, model_flops / flops_per_percent, "%")
                )
            if run.hfu is not None:
                rows.append(
                    PredictedRow(
                        f"{run.name}: HFU", run.hfu, executed_flops / flops_per_percent, "%"
                    )
                )
    return ValidationTable(
        "MFU and HFU of published times", "K22", rows, None, PERCENT_POINTS_MAX, absolute=True
    )


def _parameter_rows() -> Iterator[PredictedRow]:
    (table,) = (
        run_table for run_table in training_runs.run_tables() if run_table.name == "weak scaling"
    )
    for run in table.runs:
        name = run.name.split()[0]
        # N21 table 1 states 529.6e9 parameters for the model that is named 530B here.
        billions = {"530B": 529.6}.get(name) or float(name.removesuffix("B"))
        yield PredictedRow(name, billions, parameter_count(run.job.model) / 1e9, "1e9")


def _ranking_table() -> ValidationTable:
    """Compare predicted step times: the vendor's splits with the planner's fastest splits."""
    rows = []
    for run in training_runs.published_choices():
        # `recompute` is set only for choices of the vendor's first search, which had no sequence
        # parallelism.
        sequence_parallel = False if run.recompute else None
        space = SearchSpace(vpp=(1,), recompute=run.recompute, sequence_parallel=sequence_parallel)
        search = search_training(run.job, run.cluster, space)
        chosen_s = estimate_training(run.job, run.split, run.cluster).iteration_s
        rows.append(
            PredictedRow(
                run.name, chosen_s, min(candidate.iteration_s for candidate in search.usable)
            )
        )
    return ValidationTable(
        "step time of the vendor's split vs our fastest split", "L22, L23", rows, RANKING_MAX
    )


def _training_memory_verdicts() -> MemoryVerdicts:
    """Check that published runs, which fitted in memory, are predicted to fit; accept one error."""
    wrong, count = [], 0
    for table in training_runs.run_tables():
        if table.kind != "runs":
            continue
        for run in table.runs:
            count += 1
            memory = estimate_training(run.job, run.split, run.cluster).memory
            if memory.verdict == "over":
                wrong.append(f"{run.name} fitted; predicted {memory.total / 1e9:.0f} GB")
    return MemoryVerdicts("training runs that fit", "the tables above", count, wrong, wrong_max=1)


def _inference_tables() -> Iterator[ValidationTable]:
    tables: dict[str, list[PredictedRow]] = {}
    sources: dict[str, str] = {}
    for case in inference_runs.latency_cases():
        assert case.published is not None, "a latency case has a time"
        row = PredictedRow(case.name, case.published, case.predict(), "ms")
        tables.setdefault(case.table, []).append(row)
        sources[case.table] = case.source
    for name, rows in tables.items():
        yield ValidationTable(f"inference: {name}", sources[name], rows)
    all_rows = [row for rows in tables.values() for row in rows]
    yield ValidationTable(
        "inference, all rows", "the tables above", all_rows, INFERENCE_MEAN_MAX, is_total=True
    )
    memories = [
        PredictedRow(case.name, case.published, case.predict(), "GB")
        for case in inference_runs.memory_cases()
        if case.published is not None
    ]
    yield ValidationTable("inference: memory", "ft", memories, MEMORY_MEAN_MAX)


def _inference_memory_verdicts() -> MemoryVerdicts:
    """Check the memory verdicts of static batches.

    No run that ran out of memory may be predicted to fit. One run that fitted may be predicted to
    run out of memory.
    """
    wrong, count = [], 0
    for case in inference_runs.latency_cases():
        count += 1
        if static_memory(case.job, case.cluster).verdict == "over":
            wrong.append(f"{case.name} fitted")
    wrongly_fitting = []
    for case in inference_runs.out_of_memory_cases():
        count += 1
        if static_memory(case.job, case.cluster).verdict != "over":
            wrongly_fitting.append(f"{case.name} ran out of memory")
    return MemoryVerdicts(
        "inference runs that fit or run out of memory",
        "ft, nemo",
        count,
        [*wrongly_fitting, *wrong],
        0 if wrongly_fitting else 1,
    )
