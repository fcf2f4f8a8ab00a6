"""The `preamble plan train` command: find the fastest training configuration on given GPUs.

The command converts the specification to a training job, which trains all parameters or an adapter.
`planning.training.plan` creates the plan for this job. With `--tune CONFIG`, the plan contains a
copy of the settings file CONFIG in which only the split is changed.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import yaml

from gpt.costs.inference import parameter_count
from gpt.errors import ConfigError
from planning.cli.flags import (
    add_adapter_flags,
    add_context_tokens,
    add_hardware_flags,
    add_model_flags,
    add_plan_flags,
    add_shared_flags,
    add_training_flags,
    make_command_parser,
    parse_int_list,
    parse_token_count,
)
from planning.cli.result import CommandResult, render_plan
from planning.cli.specification import Specification
from planning.hardware import Cluster
from planning.measurement.rounds import DEFAULT_FOLDER, measure_plan
from planning.plan import Plan
from planning.training.estimate import TrainingJob
from planning.training.explanation import default_batch
from planning.training.plan import finalize_plan, plan_training
from planning.training.search import SearchSpace, split_from_settings
from planning.training.tune_settings import TuningSettings

EXAMPLES = """
  preamble plan train gpt3-175b --gpu a100-80g --gpus 1024 --global-batch 1536 --tokens 300B
  preamble plan train gpt3-1t --gpu a100-80g --gpus 3072 --output plans/1t
  preamble plan train llama3-70b --gpu h100 --nodes 2 --trainable adapter --virtual-tokens 50
  preamble plan train llama3-8b --gpu h100 --gpus 8 --method lora --lora-rank 16
  preamble plan train --tune task.yaml --gpu h100 --gpus 16 --output plans/task
  preamble tune plans/task/train_config.yaml
"""


def make_parser() -> argparse.ArgumentParser:
    parser = make_command_parser(
        "train",
        "Find the parallel sizes, the micro-batch size and the activation checkpointing that train "
        "a model, or an adapter for it, fastest on the given GPUs.",
        EXAMPLES,
    )
    add_model_flags(parser)
    add_hardware_flags(parser)
    job = parser.add_argument_group("training job").add_argument
    job(
        "--tune",
        metavar="CONFIG",
        help="settings file of `preamble tune`; the plan is for the run of this file",
    )
    job(
        "--tokens",
        metavar="N",
        type=parse_token_count,
        help="number of tokens of the whole training run, such as 300B",
    )
    add_training_flags(job)
    add_adapter_flags(job)
    add_context_tokens(job)
    axes = parser.add_argument_group(
        "search space; LIST is a list of values such as 1,2,4 (default: all values)"
    ).add_argument
    for name, meaning in (
        ("tp", "tensor-parallel sizes"),
        ("pp", "pipeline-parallel sizes"),
        ("vpp", "model chunks per pipeline stage (interleaved schedule)"),
        ("micro-batch", "micro-batch sizes"),
    ):
        axes(f"--{name}", metavar="LIST", type=parse_int_list, help=f"{meaning} to try")
    axes(
        "--recompute",
        metavar="LIST",
        type=_parse_recompute_list,
        help="modes of activation checkpointing to try: none, selective, block, full",
    )
    axes(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="try only configurations with (or without) sequence parallelism (default: both)",
    )
    axes(
        "--allow-internode-tp", action="store_true", help="also try tensor parallelism across nodes"
    )
    axes(
        "--memory-fraction",
        metavar="X",
        type=float,
        help="maximum fraction of each GPU's memory to use (default: 0.9)",
    )
    add_plan_flags(parser)
    add_shared_flags(parser)
    return parser


def _parse_recompute_list(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    for mode in modes:
        if mode not in ("none", "selective", "block", "full"):
            raise argparse.ArgumentTypeError(
                f"unknown mode {mode!r}; choose from: none, selective, block, full"
            )
    return modes


def run(args: argparse.Namespace, log: Callable[[str], None]) -> CommandResult:
    flags = {name: value for name, value in vars(args).items() if name not in _SEARCH_FLAGS}
    specification = Specification.read(args.spec, flags)
    tuning = TuningSettings.read(args.tune) if args.tune else None
    job, cluster, name = training_task(specification, tuning)
    plan = plan_training(
        job,
        cluster,
        _search_space(args, specification),
        name=name,
        tokens=specification.training.tokens,
        tuning=tuning,
    )
    if args.measure is not None:
        plan = _measure_candidates(args, plan, tuning, log)
    return render_plan(plan, args)


# Flags of the search space, which are not fields of the specification.
_SEARCH_FLAGS = ("tp", "pp", "vpp", "micro_batch", "recompute", "sequence_parallel")


def _search_space(args: argparse.Namespace, specification: Specification) -> SearchSpace:
    for flag in ("tp", "pp", "vpp", "micro_batch"):
        for value in getattr(args, flag) or ():
            if value < 1:
                raise ConfigError(
                    f"--{flag.replace('_', '-')} contains {value}; each value must be at least 1"
                )
    space = SearchSpace(
        tp=args.tp or (),
        pp=args.pp or (),
        vpp=args.vpp or (),
        micro_batch=args.micro_batch or (),
        recompute=args.recompute or (),
        sequence_parallel=args.sequence_parallel,
        internode_tp=args.allow_internode_tp,
    )
    memory_fraction = specification.constraints.memory_fraction
    return space if memory_fraction is None else replace(space, memory_fraction=memory_fraction)


def training_task(
    specification: Specification, tuning: TuningSettings | None
) -> tuple[TrainingJob, Cluster, str]:
    """Return the training job, the cluster and the model's name."""
    if tuning is not None:
        return _tuning_task(specification, tuning)
    model = specification.model.config()
    cluster = specification.hardware.cluster()
    batch = default_batch(parameter_count(model), specification.trainable, cluster.gpus)
    job = specification.training_job(model, batch)
    return job, cluster, specification.model.name


def _tuning_task(
    specification: Specification, tuning: TuningSettings
) -> tuple[TrainingJob, Cluster, str]:
    """Return the training task of a `preamble tune` settings file.

    Only the GPUs, the sequence length and the dtype come from the specification.
    """
    section, config = specification.training, tuning.config
    batch_examples = tuning.batch_examples
    if specification.model.path is not None or specification.model.layers is not None:
        raise ConfigError(
            f"the command names a model, and {tuning.path} names one too; remove the model from "
            "the command"
        )
    if section.trainable not in (None, tuning.trainable):
        raise ConfigError(
            f"--trainable {section.trainable} contradicts {tuning.path}, whose method "
            f"{config.method_config.method} means --trainable {tuning.trainable}; remove the flag"
        )
    if section.global_batch not in (None, batch_examples):
        raise ConfigError(
            f"--global-batch {section.global_batch} contradicts {tuning.path}, whose "
            f"batch_examples is {batch_examples}; remove the flag, or change the file"
        )
    if specification.adapter.spec() is not None:
        raise ConfigError(
            f"the command describes an adapter, and {tuning.path} does too; remove --method and "
            "the flags --lora-..."
        )
    job = tuning.training_job(specification.model.seq, section.context_tokens or 0)
    if specification.dtype is not None:
        job = replace(job, dtype=specification.dtype)
    return job, specification.hardware.cluster(tuning.gpus), config.model_config.model


def _measure_candidates(
    args: argparse.Namespace, plan: Plan, tuning: TuningSettings | None, log: Callable[[str], None]
) -> Plan:
    if tuning is None:
        raise ConfigError(
            "--measure runs `preamble tune` for a few steps and needs its settings file; give the "
            "file with --tune"
        )
    from planning.measurement.tuning_trial import TuningTrial

    trial = TuningTrial(
        base_settings=tuning.record,
        settings_of_row=lambda row: yaml.safe_load(
            tuning.to_yaml(split_from_settings(row.settings), [])
        ),
        make_final_plan=lambda plan, best: finalize_plan(plan, tuning, best),
    )
    return measure_plan(plan, trial, Path(args.output or DEFAULT_FOLDER), args.measure, log)
