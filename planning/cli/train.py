"""`preamble plan train`: the fastest way to train a model, or an adapter for it, on these GPUs.

What is asked becomes a job, a search finds the split, words say why; with `--tune` the settings
file of a run comes back, changed in nothing but its split.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import yaml

from gpt.costs.inference import parameter_count
from gpt.errors import ConfigError
from planning.cli.flags import (
    add_hardware_flags,
    add_model_flags,
    add_plan_flags,
    add_shared_flags,
    add_training_flags,
    add_virtual_tokens,
    numbers,
    parser_of,
    tokens,
)
from planning.cli.result import Told, told_plan
from planning.cli.specification import Specification
from planning.hardware import Cluster
from planning.measurement.rounds import UNNAMED, measure
from planning.plan import Plan
from planning.training.estimate import TrainingJob
from planning.training.explanation import default_batch
from planning.training.plan import plan_training, settled
from planning.training.search import Axes, split_of
from planning.training.tune_settings import Tuning

EXAMPLES = """
  preamble plan train gpt3-175b --gpu a100-80g --gpus 1024 --global-batch 1536 --tokens 300B
  preamble plan train gpt3-1t --gpu a100-80g --gpus 3072 --output plans/1t
  preamble plan train llama3-70b --gpu h100 --nodes 2 --trainable adapter --virtual-tokens 50
  preamble plan train --tune task.yaml --gpu h100 --gpus 16 --output plans/task
  preamble tune plans/task/train_config.yaml
"""


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "train",
        "The split, micro-batch and recomputation that train a model fastest on the GPUs at hand: "
        "all of it, or an adapter for it.",
        EXAMPLES,
    )
    add_model_flags(parser)
    add_hardware_flags(parser)
    job = parser.add_argument_group("what is trained").add_argument
    job("--tune", metavar="CONFIG", help="a settings file of `preamble tune`, to be spread anew")
    job("--tokens", metavar="N", type=tokens, help="of the whole training, as 300B")
    add_training_flags(job)
    add_virtual_tokens(job)
    axes = parser.add_argument_group("what is tried: lists as 1,2,4 (default: all)").add_argument
    for name in ("tp", "pp", "vpp", "micro-batch"):
        axes(f"--{name}", metavar="LIST", type=numbers)
    axes("--recompute", metavar="LIST", type=_kinds, help="of none, selective, block, full")
    axes("--sequence-parallel", action=argparse.BooleanOptionalAction, default=None)
    axes("--allow-internode-tp", action="store_true", help="tensor ranks across nodes too")
    axes("--memory-fraction", metavar="X", type=float, help="that may be used (default: 0.9)")
    add_plan_flags(parser)
    add_shared_flags(parser)
    return parser


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    for kind in kinds:
        if kind not in ("none", "selective", "block", "full"):
            raise argparse.ArgumentTypeError(f"{kind!r} is none of: none, selective, block, full")
    return kinds


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Told:
    flags = {name: value for name, value in vars(args).items() if name not in _AXES}
    specification = Specification.read(args.spec, flags)
    tuning = Tuning.read(args.tune) if args.tune else None
    job, cluster, name = wanted(specification, tuning)
    plan = plan_training(
        job,
        cluster,
        _axes(args, specification),
        name=name,
        tokens=specification.training.tokens,
        tuning=tuning,
    )
    if args.measure is not None:
        plan = _measured(args, plan, tuning, say)
    return told_plan(plan, args)


_AXES = ("tp", "pp", "vpp", "micro_batch", "recompute", "sequence_parallel")


def _axes(args: argparse.Namespace, asked: Specification) -> Axes:
    for flag in ("tp", "pp", "vpp", "micro_batch"):
        for value in getattr(args, flag) or ():
            if value < 1:
                raise ConfigError(f"--{flag.replace('_', '-')} has {value}; it must be at least 1")
    fraction = asked.constraints.memory_fraction
    return Axes(
        args.tp or (),
        args.pp or (),
        args.vpp or (),
        args.micro_batch or (),
        args.recompute or (),
        args.sequence_parallel,
        args.allow_internode_tp,
        *(() if fraction is None else (fraction,)),
    )


def wanted(asked: Specification, tuning: Tuning | None) -> tuple[TrainingJob, Cluster, str]:
    """What is trained, on what, and its name."""
    if tuning is not None:
        return _tuned(asked, tuning)
    model = asked.model.config()
    cluster = asked.hardware.cluster()
    trainable = asked.training.trainable or "all"
    batch = default_batch(parameter_count(model), trainable, cluster.gpus)
    job = asked.training_job(model, batch)
    return job, cluster, asked.model.name


def _tuned(asked: Specification, tuning: Tuning) -> tuple[TrainingJob, Cluster, str]:
    """The settings file says all but the GPUs, and how long examples are."""
    wish = asked.training
    if asked.model.path is not None or asked.model.layers is not None:
        raise ConfigError(f"{tuning.path} names the model, and so does the command; leave one out")
    if wish.trainable not in (None, tuning.trainable):
        raise ConfigError(
            f"--trainable {wish.trainable} contradicts {tuning.path}, whose method is "
            f"{tuning.config.method}: that trains {tuning.trainable}; leave the flag out"
        )
    if wish.global_batch not in (None, tuning.config.batch_examples):
        raise ConfigError(
            f"--global-batch {wish.global_batch} contradicts {tuning.path}, whose batch_examples "
            f"is {tuning.config.batch_examples}; change it there"
        )
    job = tuning.job(asked.model.seq)
    if asked.dtype is not None:
        job = replace(job, dtype=asked.dtype)
    return job, asked.hardware.cluster(tuning.gpus), tuning.config.model


def _measured(
    args: argparse.Namespace, plan: Plan, tuning: Tuning | None, say: Callable[[str], None]
) -> Plan:
    if tuning is None:
        raise ConfigError(
            "--measure runs `preamble tune` for a few steps, and needs to know of what: give its "
            "settings file with --tune"
        )
    from planning.measurement.tuning_trial import TuningTrial

    trial = TuningTrial(
        base=tuning.record,
        settings=lambda row: yaml.safe_load(tuning.yaml(split_of(row.settings), [])),
        settled=lambda plan, best: settled(plan, tuning, best),
    )
    return measure(plan, trial, Path(args.output or UNNAMED), args.measure, say)
