"""Predicts every published table anew, and says how far off it is.

Closed forms are held to half a percent, times to the targets below, verdicts on memory to what ran
and what did not. It knows no model of its own: each row asks the same functions that `estimate`
does. Which rows there are, and what they are of, is `published/`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpt.costs.inference import parameter_count
from gpt.costs.training import forward_flops, recompute_flops, step_flops
from planning.hardware import GIB, Cluster, find_device
from planning.published import inference_runs, training_runs
from planning.published.static_batch import static_memory
from planning.published.training_runs import Run, Runs
from planning.training.efficiency import software
from planning.training.estimate import estimate_training, layer_seconds
from planning.training.search import Axes, search_training

TRAINING_MEAN_MAX = 0.05
TRAINING_WORST_MAX = 0.12
INFERENCE_MEAN_MAX = 0.07
CLOSED_FORM_MAX = 0.005
POINTS_MAX = 0.3  # Of MFU and HFU.
RANKING_MAX = 0.05  # How much faster than what was chosen the fastest may seem, in the mean.
MEMORY_MEAN_MAX = 0.03
# Without model parallelism: kernels less tuned than Megatron's, and how much of the network it got.
# Fitted to the three rows that there are.
ZERO_COMPUTING = 0.62
ZERO_NETWORK = 0.70
NAME_WIDTH = 59


@dataclass(frozen=True)
class Checked:
    """A row of a published table, beside what the model says of it."""

    name: str
    published: float
    predicted: float
    unit: str = "s"

    @property
    def error(self) -> float:
        """Signed: 0.05 is 5 % too much."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Table:
    """A published table, and whether it is within its targets."""

    name: str
    source: str
    rows: Sequence[Checked]
    mean_max: float | None = None  # None: nothing is asked of it.
    worst_max: float | None = None
    absolute: bool = False  # Errors and targets are in the rows' unit.
    total: bool = False  # Of other tables' rows.

    def error(self, row: Checked) -> float:
        return row.predicted - row.published if self.absolute else row.error

    @property
    def mean(self) -> float:
        return sum(abs(self.error(row)) for row in self.rows) / len(self.rows)

    @property
    def worst(self) -> float:
        return max(abs(self.error(row)) for row in self.rows)

    @property
    def good(self) -> bool:
        mean = self.mean_max is None or self.mean <= self.mean_max
        return mean and (self.worst_max is None or self.worst <= self.worst_max)


@dataclass(frozen=True)
class Verdicts:
    """Configurations that ran or did not fit, and those of which the model says otherwise."""

    name: str
    source: str
    count: int
    wrong: Sequence[str]
    wrong_max: int = 0

    @property
    def good(self) -> bool:
        return len(self.wrong) <= self.wrong_max


@dataclass(frozen=True)
class Report:
    tables: Sequence[Table]
    verdicts: Sequence[Verdicts]

    @property
    def good(self) -> bool:
        return all(one.good for one in self.tables) and all(one.good for one in self.verdicts)

    def figures(self) -> Mapping[str, object]:
        """As plain data, for `--json`."""
        return {
            "good": self.good,
            "tables": [_table_figures(table) for table in self.tables],
            "verdicts": [
                {
                    "name": one.name,
                    "source": one.source,
                    "configurations": one.count,
                    "wrong": list(one.wrong),
                    "wrong_max": one.wrong_max,
                    "good": one.good,
                }
                for one in self.verdicts
            ],
        }

    def text(self, rows: bool = False) -> str:
        """A line for each table; with `rows`, theirs before it."""
        lines = []
        if rows:
            shown = [table for table in self.tables if not table.total]
            lines = [line for table in shown for line in _table_lines(table)]
        lines += [_summary(table) for table in self.tables]
        for one in self.verdicts:
            mark = "ok" if one.good else "OUTSIDE"
            right = one.count - len(one.wrong)
            lines += [f"{one.name:{NAME_WIDTH}} {right} of {one.count} right  {mark}"]
            lines += [f"  but {name}" for name in one.wrong]
        lines += ["all within their targets" if self.good else "some are outside of their targets"]
        return "\n".join(lines)


def _table_figures(table: Table) -> Mapping[str, object]:
    return {
        "name": table.name,
        "source": table.source,
        "error_unit": table.rows[0].unit if table.absolute else "share",
        "mean_error": table.mean,
        "worst_error": table.worst,
        "mean_error_max": table.mean_max,
        "worst_error_max": table.worst_max,
        "good": table.good,
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


def _table_lines(table: Table) -> list[str]:
    lines = [f"{table.name} [{table.source}]"]
    wide = max(len(row.name) for row in table.rows)
    for row in table.rows:
        lines.append(
            f"  {row.name:{wide}}  published {row.published:9.4g}  predicted {row.predicted:9.4g} "
            f"{row.unit:5} {_error(table, table.error(row), '+')}"
        )
    return [*lines, f"  {_totals(table)}", ""]


def _summary(table: Table) -> str:
    return f"{table.name:{NAME_WIDTH}} {_totals(table)}"


def _totals(table: Table) -> str:
    words = f"mean {_error(table, table.mean)}, worst {_error(table, table.worst)}"
    targets = [
        f"{name} {_error(table, value).strip()}"
        for name, value in (("mean", table.mean_max), ("worst", table.worst_max))
        if value is not None
    ]
    if not targets:
        return f"{words}  (for information)"
    return f"{words}  {'ok' if table.good else 'OUTSIDE'} (at most {', '.join(targets)})"


def _error(table: Table, value: float, sign: str = "") -> str:
    if table.absolute:
        return f"{value:{sign}7.2f} {table.rows[0].unit}"
    return f"{100 * value:{sign}5.1f} %"


def validate() -> Report:
    ours = [table for table in training_runs.runs() if table.kind != "zero3"]
    training = [_runs(table) for table in ours]
    everything = Table(
        "training, all runs",
        "the tables above",
        [row for table in training for row in table.rows],
        TRAINING_MEAN_MAX,
        TRAINING_WORST_MAX,
        total=True,
    )
    tables = [*training, everything, *_zero(), _layers(), *_closed_forms(), _ranking()]
    return Report([*tables, *_inference()], [_ran(), _fits()])


def _runs(table: Runs) -> Table:
    rows = [Checked(run.name, run.seconds, _estimate_s(run), "s") for run in table.runs]
    mean = TRAINING_MEAN_MAX if table.kind == "runs" else None  # A figure is read off to 5 %.
    return Table(f"training: {table.name}", table.source, rows, mean, TRAINING_WORST_MAX)


def _estimate_s(run: Run) -> float:
    return estimate_training(run.job, run.split, run.cluster).iteration_s


def _zero() -> Iterator[Table]:
    """Every GPU has all layers, and gathers their weights twice while it computes.

    Not a split of ours; here to show what it is that a plan avoids.
    """
    for table in training_runs.runs():
        if table.kind != "zero3":
            continue
        rows = []
        for run in table.runs:
            device = run.cluster.device
            there, back = layer_seconds(run.job, run.split, run.cluster, software(device))
            computing_s = run.job.model.num_layers * (there + back) / ZERO_COMPUTING
            # Weights there and back, and gradients to where they are summed.
            sent = 3 * 2 * parameter_count(run.job.model)
            sending_s = sent / (device.network_bytes * ZERO_NETWORK)
            rows.append(Checked(run.name, run.seconds, max(computing_s, sending_s)))
        yield Table(f"training: {table.name}", table.source, rows, None, TRAINING_WORST_MAX)


def _layers() -> Table:
    rows = []
    for one in training_runs.layers():
        kind = software(one.cluster.device)
        there, back = layer_seconds(one.job, one.split, one.cluster, kind)
        rows.append(Checked(f"{one.name}, forward", one.forward_ms, there * 1000, "ms"))
        rows.append(Checked(f"{one.name}, backward", one.backward_ms, back * 1000, "ms"))
    return Table("one layer of 22B", "K22 table 4", rows, TRAINING_MEAN_MAX, TRAINING_WORST_MAX)


def _closed_forms() -> Iterator[Table]:
    kept, shares, states = [], [], []
    device = find_device("a100-80g")
    for one in training_runs.kept():
        found = []
        for (name, split), gib in zip(one.splits.items(), one.gib, strict=True):
            memory = estimate_training(one.job, split, Cluster(device, split.gpus)).memory
            found.append(memory.activations / GIB)
            kept.append(Checked(f"{one.name} {name}", gib, found[-1], "GiB"))
        for name, percent, gib in zip(one.splits, one.percent, found, strict=True):
            shares.append(Checked(f"{one.name} {name}", percent, 100 * gib / found[0], "%"))
        split = one.splits["TP"]
        model = one.job.model
        without = parameter_count(model) - model.hidden_size * (
            model.vocab_size + model.max_position_embeddings
        )
        states_gib = 18 * without / (split.tp * split.pp) / GIB
        states.append(Checked(f"{one.name} states", one.states_gib, states_gib, "GiB"))
    source = "K22 section 4 and figures 1 and 7"
    yield Table("activations of the first stage", source, [*kept, *states], None, CLOSED_FORM_MAX)
    yield Table("the same, of those with TP alone", source, shares, None, 0.3, absolute=True)
    yield _utilisation()
    yield Table("parameters", "N21 table 1", list(_sizes()), None, 0.05, absolute=True)


def _utilisation() -> Table:
    """From published times: that operations are counted as the field counts them."""
    rows = []
    for table in training_runs.runs():
        for run in table.runs:
            flops = forward_flops(run.job.model, run.job.global_batch, run.job.sequence)
            model_flops = step_flops(flops, run.job.trainable)
            executed = model_flops + recompute_flops(flops, run.split.recompute)
            whole = run.seconds * run.split.gpus * run.cluster.device.flops / 100
            if run.mfu is not None:
                rows.append(Checked(f"{run.name}: MFU", run.mfu, model_flops / whole, "%"))
            if run.hfu is not None:
                rows.append(Checked(f"{run.name}: HFU", run.hfu, executed / whole, "%"))
    return Table("MFU and HFU of published times", "K22", rows, None, POINTS_MAX, absolute=True)


def _sizes() -> Iterator[Checked]:
    (table,) = (one for one in training_runs.runs() if one.name == "weak scaling")
    for run in table.runs:
        name = run.name.split()[0]
        size = {"530B": 529.6}.get(name) or float(name.removesuffix("B"))
        yield Checked(name, size, parameter_count(run.job.model) / 1e9, "1e9")


def _ranking() -> Table:
    """What the vendor's search settled on, against what ours calls the fastest."""
    rows = []
    for run in training_runs.chosen():
        together = False if run.recompute else None
        axes = Axes(vpp=(1,), recompute=run.recompute, sequence_parallel=together)
        found = search_training(run.job, run.cluster, axes)
        chosen_s = estimate_training(run.job, run.split, run.cluster).iteration_s
        rows.append(Checked(run.name, chosen_s, min(one.iteration_s for one in found.usable)))
    return Table("chosen by the vendor's tool, and our fastest", "L22, L23", rows, RANKING_MAX)


def _ran() -> Verdicts:
    """A run that was published did fit."""
    wrong, count = [], 0
    for table in training_runs.runs():
        if table.kind != "runs":
            continue
        for run in table.runs:
            count += 1
            memory = estimate_training(run.job, run.split, run.cluster).memory
            if memory.verdict == "over":
                wrong.append(f"{run.name} ran; predicted {memory.total / 1e9:.0f} GB")
    return Verdicts("training runs that fit", "the tables above", count, wrong, wrong_max=1)


def _inference() -> Iterator[Table]:
    tables: dict[str, list[Checked]] = {}
    sources: dict[str, str] = {}
    for case in inference_runs.times():
        assert case.published is not None, "it has a time"
        row = Checked(case.name, case.published, case.predicted(), "ms")
        tables.setdefault(case.table, []).append(row)
        sources[case.table] = case.source
    for name, rows in tables.items():
        yield Table(f"inference: {name}", sources[name], rows)
    every = [row for rows in tables.values() for row in rows]
    yield Table("inference, all rows", "the tables above", every, INFERENCE_MEAN_MAX, total=True)
    memories = [
        Checked(case.name, case.published, case.predicted(), "GB")
        for case in inference_runs.memories()
        if case.published is not None
    ]
    yield Table("inference: memory", "ft", memories, MEMORY_MEAN_MAX)


def _fits() -> Verdicts:
    """No run that was out of memory may be called one that fits; one may be refused that ran."""
    wrong, count = [], 0
    for case in inference_runs.times():
        count += 1
        if static_memory(case.job, case.cluster).verdict == "over":
            wrong.append(f"{case.name} ran")
    bad = []
    for case in inference_runs.out_of_memory():
        count += 1
        if static_memory(case.job, case.cluster).verdict != "over":
            bad.append(f"{case.name} did not fit")
    return Verdicts(
        "inference that fits, and that does not", "ft, nemo", count, [*bad, *wrong], 0 if bad else 1
    )
