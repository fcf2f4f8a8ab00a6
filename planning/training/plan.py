"""A plan for training: searched, compared with the other kind of training, and put into words.

With a tuning run's settings the plan carries the file that `preamble tune` starts from. What can be
tried, and how it is judged, is `planning.training.search`'s.
"""

from dataclasses import replace

from planning.figures import number
from planning.hardware import DEVICES, Cluster
from planning.plan import SETTINGS_FILES, Axis, Plan, Row
from planning.training.estimate import TrainingJob
from planning.training.explanation import DAY_S, advice, asked, binding, what_would_fit, why_not
from planning.training.search import (
    Axes,
    Found,
    Refusal,
    distributed,
    rows_of,
    search_training,
    split_of,
)
from planning.training.tune_settings import Tuning

SETTINGS_FILE = SETTINGS_FILES["training"]


def plan_training(
    job: TrainingJob,
    cluster: Cluster,
    axes: Axes | None = None,
    *,
    name: str = "the model",
    tokens: float | None = None,
    tuning: Tuning | None = None,
) -> Plan:
    """The whole of it: searched, compared with the other kind of training, and told."""
    axes = axes or Axes()
    refusal: Refusal = tuning.refusal if tuning is not None else lambda split: ""
    found = search_training(job, cluster, axes, refusal)
    plan = Plan(
        title="training",
        asked=asked(job, cluster, axes, name, tokens),
        objective="the shortest step: most tokens a second",
        rows=[_with_days(row, tokens) for row in rows_of(found)],
        x=Axis("memory_bytes", "memory of the fullest GPU", "low"),
        y=Axis("tokens_per_s", "tokens/s", "high"),
    )
    if found.best is None:
        return replace(plan, advice=what_would_fit(found))
    brief = Axes(internode_tp=axes.internode_tp, brief=True)
    other = search_training(_other(job), cluster, brief)
    worth = advice(found, tokens, other)
    if tuning is None:
        worth.append(f"in Megatron's words: {megatron_flags(found)}")
    else:
        worth += _of_tuning(tuning, job, cluster)
    plan = replace(plan, binding=binding(found), why_not=why_not(found), advice=worth)
    return plan if tuning is None else settled(plan, tuning, plan.best)


def _other(job: TrainingJob) -> TrainingJob:
    """The same, of what learns: the other."""
    if job.trainable == "all":
        usual = min(20, job.sequence - 1)
        return replace(job, trainable="adapter", virtual_tokens=job.virtual_tokens or usual)
    return replace(job, trainable="all", virtual_tokens=0)


def _with_days(row: Row, tokens: float | None) -> Row:
    speed = row.figures.get("tokens_per_s")
    if tokens is None or not speed:
        return row
    return replace(row, figures={**row.figures, "training_days": tokens / speed / DAY_S})


def _of_tuning(tuning: Tuning, job: TrainingJob, cluster: Cluster) -> list[str]:
    lines = [f"examples are counted as {job.sequence:,} tokens each; --seq says how long they are"]
    if cluster.device.name not in DEVICES:
        lines.append(
            f"{cluster.device.name} is no GPU whose training is published: have the best ones run "
            "(--measure) before you rely on it"
        )
    elif tuning.config.device == "cpu":
        lines.append(
            f"{tuning.path} says device: cpu, and so does what is written; change it there"
        )
    return lines


def settled(plan: Plan, tuning: Tuning, best: Row | None) -> Plan:
    """The plan with the settings file of its best candidate."""
    if best is None:
        return replace(plan, settings_yaml="", command="", binding=[], why_not=[])
    speed = best.measured.get("tokens_per_s", best.figures.get("tokens_per_s", 0.0))
    trust = replace(best.trust, note="") if best.trust is not None else None
    notes = [
        f"preamble plan train --tune {tuning.path}: {best.name}",
        f"{number(speed)} tokens/s [{trust}]",
    ]
    text = tuning.yaml(split_of(best.settings), [_one_line(note) for note in notes])
    return replace(plan, settings_yaml=text, command=f"preamble tune {SETTINGS_FILE}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def megatron_flags(found: Found) -> str:
    """The split, as arguments of Megatron-LM's training."""
    assert found.best is not None and found.best.estimate is not None
    split = found.best.split
    words = [
        f"--tensor-model-parallel-size {split.tp}",
        f"--pipeline-model-parallel-size {split.pp}",
        f"--micro-batch-size {split.micro_batch}",
        f"--global-batch-size {found.job.global_batch}",
    ]
    if split.vpp > 1:
        layers = found.job.model.num_layers // (split.pp * split.vpp)
        words.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    if split.sequence_parallel:
        words.append("--sequence-parallel")
    if found.job.trainable == "all" and distributed(found.best.estimate):
        words.append("--use-distributed-optimizer")
    if split.recompute == "selective":
        words.append("--recompute-activations")
    elif split.recompute in ("block", "full"):
        method = "block" if split.recompute == "block" else "uniform"
        layers = split.recompute_layers // split.vpp if method == "block" else 1
        words.append(
            f"--recompute-granularity full --recompute-method {method} --recompute-num-layers "
            f"{layers}"
        )
    return " ".join(words)
