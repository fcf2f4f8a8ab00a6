"""Small trainers, and training examples."""

from gpt.model.gpt_model import GPT
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example
from ptuning.linears.trainable_linears import build_trainable_linears
from ptuning.prompt.prefix_tuning import build_prefix
from ptuning.prompt.prompt_encoder import build_encoder
from ptuning.run_facts import StepMetrics
from ptuning.training.trainer import Trainer

SETTINGS = {"model": "m", "data": "d", "name": "n", "virtual_tokens": 2}


def examples(vocab_size: int) -> list[Example]:
    """Two virtual tokens in front, answers of different lengths."""
    v = vocab_size
    return [
        Example([v, v + 1, 5, 6, 7], 4),
        Example([v, v + 1, 9, 3, 1, 2, 8], 3),
        Example([v, v + 1, 9, 3, 4, 11, 12, 13, 14], 7),
        Example([v, v + 1, 30, 31, 32, 33], 3),
    ]


def settings(**changes: object) -> TuneConfig:
    return TuneConfig.from_dict({**SETTINGS, **changes}, "here")


def trainer(model: GPT, **changes: object) -> Trainer:
    config = settings(**changes)
    method_config, seed = config.method_config, config.training_config.seed
    tasks = config.data_config.resolved_tasks
    encoder = None
    if method_config.changes_linears:
        linears = build_trainable_linears(config.task_method_configs, tasks, [model], seed=seed)
        return Trainer([model], config, linears=linears)
    if method_config.method == "prefix":
        prefix = build_prefix(method_config, tasks, [model], [[]], seed=seed)
        return Trainer([model], config, prefix=prefix)
    if method_config.method != "full":
        encoder = build_encoder(method_config, tasks, model, [[]], seed=seed)
    return Trainer([model], config, encoder)


def learn(trainer: Trainer, steps: int) -> list[StepMetrics]:
    batch = examples(trainer.model_config.vocab_size)
    return [trainer.step(batch) for _ in range(steps)]
