"""Training plan: turns a search result into rows, explanations and train_config.yaml.

The plan also compares training all parameters with training an adapter. For a `preamble tune` run,
the plan contains the settings file of the run. `planning.training.search` defines and ranks the
candidates.
"""

from dataclasses import replace

from planning.figures import format_number
from planning.hardware import DEVICES, Cluster
from planning.plan import SETTINGS_FILES, Axis, Plan, Row
from planning.training.estimate import TrainingJob
from planning.training.explanation import (
    DAY_S,
    advice_lines,
    alternative_lines,
    binding_lines,
    fit_advice_lines,
    request_lines,
)
from planning.training.search import (
    Refusal,
    SearchSpace,
    TrainingSearchResult,
    is_optimizer_distributed,
    plan_rows,
    search_training,
    split_from_settings,
)
from planning.training.tune_settings import TuningSettings

SETTINGS_FILE = SETTINGS_FILES["training"]


def plan_training(
    job: TrainingJob,
    cluster: Cluster,
    space: SearchSpace | None = None,
    *,
    name: str = "the model",
    tokens: float | None = None,
    tuning: TuningSettings | None = None,
) -> Plan:
    """Search for the fastest split, and return the plan with explanations.

    `name`: the name of the model. `tokens`: the number of tokens of the whole run; None: unknown.
    `tuning`: the settings file, if the plan is for a run of `preamble tune`; else None.
    """
    space = space or SearchSpace()
    refusal: Refusal = tuning.refusal_reason if tuning is not None else lambda split: ""
    search = search_training(job, cluster, space, refusal)
    plan = Plan(
        title="training",
        request=request_lines(job, cluster, space, name, tokens),
        objective="the shortest step, and so the most tokens per second",
        rows=[_with_training_days(row, tokens) for row in plan_rows(search)],
        x=Axis("memory_bytes", "memory of the fullest GPU", "low"),
        y=Axis("tokens_per_s", "tokens/s", "high"),
    )
    if search.best is None:
        return replace(plan, advice=fit_advice_lines(search))
    comparison_space = SearchSpace(internode_tp=space.internode_tp, brief=True)
    other_search = search_training(_other_trainable_job(job), cluster, comparison_space)
    advice = advice_lines(search, tokens, other_search)
    if tuning is None:
        advice.append(f"Megatron-LM flags: {megatron_flags(search)}")
    else:
        advice += _tuning_advice(tuning, job, cluster)
    plan = replace(
        plan, binding=binding_lines(search), why_not=alternative_lines(search), advice=advice
    )
    return plan if tuning is None else finalize_plan(plan, tuning, plan.best)


def _other_trainable_job(job: TrainingJob) -> TrainingJob:
    """Return the job that trains an adapter if `job` trains all parameters, and vice versa."""
    if job.trainable == "all":
        default_virtual_tokens = min(20, job.sequence - 1)
        return replace(
            job, trainable="adapter", virtual_tokens=job.virtual_tokens or default_virtual_tokens
        )
    return replace(job, trainable="all", virtual_tokens=0, linears=None, context_tokens=0)


def _with_training_days(row: Row, tokens: float | None) -> Row:
    tokens_per_s = row.figures.get("tokens_per_s")
    if tokens is None or not tokens_per_s:
        return row
    return replace(row, figures={**row.figures, "training_days": tokens / tokens_per_s / DAY_S})


def _tuning_advice(tuning: TuningSettings, job: TrainingJob, cluster: Cluster) -> list[str]:
    lines = [f"each example counts as {job.sequence:,} tokens; set another length with --seq"]
    if cluster.device.name not in DEVICES:
        lines.append(
            f"there are no published training runs on {cluster.device.name}: run the best "
            "candidates (--measure) before you rely on the plan"
        )
    elif tuning.config.model_config.device == "cpu":
        lines.append(
            f"{tuning.path} has device: cpu, and the written settings keep this device; to train "
            "on GPUs, set device: cuda"
        )
    return lines


def finalize_plan(plan: Plan, tuning: TuningSettings, best: Row | None) -> Plan:
    """Return the plan with the settings file and the command of the row `best`.

    If `best` is None, the settings file, the command and the texts on the best candidate are empty.
    """
    if best is None:
        return replace(plan, settings_yaml="", command="", binding=[], why_not=[])
    tokens_per_s = best.measured.get("tokens_per_s", best.figures.get("tokens_per_s", 0.0))
    short_confidence = replace(best.confidence, note="") if best.confidence is not None else None
    notes = [
        f"preamble plan train --tune {tuning.path}: {best.name}",
        f"{format_number(tokens_per_s)} tokens/s [{short_confidence}]",
    ]
    text = tuning.to_yaml(
        split_from_settings(best.settings), [_collapse_whitespace(note) for note in notes]
    )
    return replace(plan, settings_yaml=text, command=f"preamble tune {SETTINGS_FILE}")


def _collapse_whitespace(text: str) -> str:
    return " ".join(text.split())


def megatron_flags(search: TrainingSearchResult) -> str:
    """Return the best split as command-line arguments of Megatron-LM."""
    assert search.best is not None and search.best.estimate is not None
    split = search.best.split
    flags = [
        f"--tensor-model-parallel-size {split.tp}",
        f"--pipeline-model-parallel-size {split.pp}",
        f"--micro-batch-size {split.micro_batch}",
        f"--global-batch-size {search.job.global_batch}",
    ]
    if split.vpp > 1:
        layers = search.job.model.num_layers // (split.pp * split.vpp)
        flags.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    if split.sequence_parallel:
        flags.append("--sequence-parallel")
    if search.job.trainable == "all" and is_optimizer_distributed(search.best.estimate):
        flags.append("--use-distributed-optimizer")
    if split.recompute == "selective":
        flags.append("--recompute-activations")
    elif split.recompute in ("block", "full"):
        method = "block" if split.recompute == "block" else "uniform"
        layers = split.recompute_layers // split.vpp if method == "block" else 1
        flags.append(
            f"--recompute-granularity full --recompute-method {method} --recompute-num-layers "
            f"{layers}"
        )
    return " ".join(flags)
