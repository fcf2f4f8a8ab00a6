"""Quality of trained adapters on a toy base model, with the required results.

Each result is compared with the same text without a prompt and with a written instruction (the
oracle), and with a task that the base model was never taught (the control). The seeds vary the
adapter. The evaluation uses words that occur in no training record. The option `-s` of
`pytest -m slow -s` prints the tables.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import serving
from checkpoints_tools.conversion.convert import convert, plan
from checkpoints_tools.writers.registry import ConversionOptions
from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.adapters.prompt_template import PromptTemplate
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.logical_tensor import checkpoint_from_tensors
from gpt.formats.registry import open_checkpoint
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from ptuning.config import TuneConfig
from ptuning.training.learning_rate import learning_rate_factor
from serving.config import ServerConfig
from serving.request import Ask
from tests.support import toy_tasks
from tests.support.suites import by_suite, cases_by_suite

VIRTUAL = 8
STEPS = 200
SAVED_STEPS = (50, 100, STEPS)  # The steps after which a table is saved.
SEEDS = (0, 1, 2)  # The hardest task has all seeds; the others show that it is not a special case.
BEFORE = "<|VIRTUAL_PROMPT_0|>{word}" + toy_tasks.ARROW + "{answer}"
AFTER = "{word}<|VIRTUAL_PROMPT_0|>" + toy_tasks.ARROW + "{answer}"
BARE = "{word}" + toy_tasks.ARROW + "{answer}"
TRAINING_WORDS = 2000
EVALUATION_WORDS = 256
# Seeds of the words.
TRAINING_SEED = 11
EVALUATION_SEED = 12

METHODS = ("prompt-tuning", "tpmlp")
HARDEST_TASK = "reverse"  # The task that takes the most steps.
SLACK = 0.02  # Allowed difference from the oracle or a peer: five words of 256.
GUESS_SCORE_MAX = 0.1  # Limit without a prompt, when the task is undetermined.
UNTRAINED_SCORE_MAX = 0.02  # Limit of a task that the base cannot do.


@dataclass
class TrainedAdapters:
    """The base model in fp32 and the adapters trained so far; the tests share both."""

    path: Path
    folder: Path
    model: GPT
    tables: dict[tuple[object, ...], dict[int, Tensor]] = field(default_factory=dict)
    cached_scores: dict[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokenizer = toy_tasks.open_checkpoint_tokenizer(self.path)

    def config(self, task: str, method: str, seed: int, **changes: Any) -> TuneConfig:
        """The default settings, except for those of the toy model."""
        return TuneConfig(
            **{
                "model": str(self.path),
                "data": str(self.file(task)),
                "name": task,
                "template": BEFORE,
                "answer_field": "answer",
                "virtual_tokens": VIRTUAL,
                "method": method,
                "steps": STEPS,
                "seed": seed,
                **changes,
            }
        )

    def file(self, task: str) -> Path:
        path = self.folder / f"{task}.jsonl"
        if not path.exists():
            records = toy_tasks.records(task, TRAINING_WORDS, TRAINING_SEED)
            path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
        return path

    def learned(self, task: str, method: str, seed: int, **changes: Any) -> dict[int, Tensor]:
        key = (task, method, seed, *sorted(changes.items()))
        if key not in self.tables:
            config = self.config(task, method, seed, **changes)
            self.tables[key] = toy_tasks.train_prompt(self.model, config, SAVED_STEPS)
        return self.tables[key]

    def score(
        self,
        task: str,
        table: Tensor | None = None,
        *,
        template: str = BEFORE,
        signs: str = "",
        kind: str = "rows",
    ) -> float:
        """The share of held-out words with an exactly right answer."""
        rows = 0 if table is None else len(table)
        shape = PromptTemplate(
            template if rows else signs + BARE, (rows,) if rows else (), answer_field="answer"
        )
        examples = [
            shape.render(
                self.tokenizer,
                record,
                vocab_size=self.model.config.vocab_size,
                tokens_max=64,
                with_answer=True,
            )
            for record in toy_tasks.records(task, EVALUATION_WORDS, EVALUATION_SEED)
        ]
        prompts = [example.ids[: example.answer_start] for example in examples]
        answers = [example.ids[example.answer_start :] for example in examples]
        return toy_tasks.exact_match_share(self.model, prompts, answers, table, kind)

    def score_without_prompt(self, task: str) -> float:
        """Score without a prompt."""
        return self._cached_score(task, "")

    def oracle(self, task: str) -> float:
        """Score with as many instruction tokens as there are virtual tokens."""
        return self._cached_score(task, "".join((toy_tasks.SIGNS[task] * VIRTUAL)[:VIRTUAL]))

    def _cached_score(self, task: str, signs: str) -> float:
        if (task, signs) not in self.cached_scores:
            self.cached_scores[task, signs] = self.score(task, signs=signs)
        return self.cached_scores[task, signs]

    def control(self, method: str) -> float:
        """Score of the same method on the untaught control task."""
        key = (toy_tasks.CONTROL, method)
        if key not in self.cached_scores:
            self.cached_scores[key] = self.score(toy_tasks.CONTROL, self.learned(*key, 0)[STEPS])
        return self.cached_scores[key]

    def comparison(self, task: str) -> str:
        """The scores that are printed beside every result."""
        control = max(self.control(method) for method in METHODS)
        return (
            f"no prompt {self.score_without_prompt(task):.3f}, oracle {self.oracle(task):.3f}, "
            f"control {control:.3f}"
        )

    @property
    def digest(self) -> str:
        """Digest of the current weights."""
        tensors = {name: value.detach() for name, value in self.model.named_parameters()}
        return base_digest(checkpoint_from_tensors(self.model.config, tensors))


@pytest.fixture(scope="module")
def trained_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedAdapters]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = toy_tasks.base()
    model = load_model(open_checkpoint(path), Mesh.single(), dtype="float32").eval()
    yield TrainedAdapters(path, tmp_path_factory.mktemp("quality"), model)
    torch.set_num_threads(threads)


def spread(scores: Sequence[float]) -> str:
    return f"{sum(scores) / len(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})"


@pytest.mark.slow
def test_evaluation_words_are_not_training_words() -> None:
    training_words = {
        record["word"] for record in toy_tasks.records("copy", TRAINING_WORDS, TRAINING_SEED)
    }
    assert not training_words & {
        r["word"] for r in toy_tasks.records("copy", EVALUATION_WORDS, EVALUATION_SEED)
    }


@pytest.mark.slow
def test_base_model_follows_instructions_and_guesses_without(
    trained_adapters: TrainedAdapters,
) -> None:
    oracle_scores = {task: trained_adapters.oracle(task) for task in toy_tasks.TASKS}
    bare = {task: trained_adapters.score_without_prompt(task) for task in toy_tasks.TASKS}
    for task in toy_tasks.TASKS:
        print(f"\n{task}: instructed {oracle_scores[task]:.3f}, without {bare[task]:.3f}", end="")
    assert sum(score >= 0.95 for score in oracle_scores.values()) >= 6
    assert max(bare.values()) <= GUESS_SCORE_MAX


@pytest.mark.parametrize(
    ("task", "method", "seeds"),
    cases_by_suite(
        [
            (HARDEST_TASK, "prompt-tuning", SEEDS[:1]),
            ("next", "prompt-tuning", SEEDS[:1]),
            ("kana", "prompt-tuning", SEEDS[:1]),
            (HARDEST_TASK, "tpmlp", SEEDS[:1]),
        ],
        [
            (HARDEST_TASK, "prompt-tuning", SEEDS[1:]),
            (HARDEST_TASK, "tpmlp", SEEDS[1:]),
            ("rotate", "prompt-tuning", SEEDS[:1]),
            ("kana", "tpmlp", SEEDS[:1]),
        ],
    ),
)
def test_adapter_is_as_good_as_the_written_instruction(
    trained_adapters: TrainedAdapters, task: str, method: str, seeds: Sequence[int]
) -> None:
    digest_before = trained_adapters.digest
    scores = [
        trained_adapters.score(task, trained_adapters.learned(task, method, seed)[STEPS])
        for seed in seeds
    ]
    print(f"\n{task}, {method}: {spread(scores)}; {trained_adapters.comparison(task)}")
    assert min(scores) >= trained_adapters.oracle(task) - SLACK
    assert trained_adapters.score_without_prompt(task) <= GUESS_SCORE_MAX
    assert trained_adapters.digest == digest_before
    assert all(value.grad is None for value in trained_adapters.model.parameters())


@pytest.mark.parametrize("seeds", by_suite(SEEDS[:1], SEEDS))
def test_prefix_is_as_good_as_the_written_instruction(
    trained_adapters: TrainedAdapters, seeds: Sequence[int]
) -> None:
    digest_before = trained_adapters.digest
    task = HARDEST_TASK
    tables = [trained_adapters.learned(task, "prefix", seed)[STEPS] for seed in seeds]
    scores = [trained_adapters.score(task, table, kind="prefix") for table in tables]
    print(f"\n{task}, prefix: {spread(scores)}; {trained_adapters.comparison(task)}")
    assert min(scores) >= trained_adapters.oracle(task) - SLACK
    assert trained_adapters.digest == digest_before


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_prompt_does_not_learn_an_untaught_task(
    trained_adapters: TrainedAdapters, method: str
) -> None:
    print(f"\n{toy_tasks.CONTROL}, {method}: {trained_adapters.control(method):.3f}")
    assert trained_adapters.control(method) <= UNTRAINED_SCORE_MAX


@pytest.mark.parametrize("method", cases_by_suite(["lstm"], ["mlp", "peft-mlp"]))
def test_every_encoder_is_as_good_with_its_defaults(
    trained_adapters: TrainedAdapters, method: str
) -> None:
    score = trained_adapters.score(
        HARDEST_TASK, trained_adapters.learned(HARDEST_TASK, method, 0)[STEPS]
    )
    print(f"\n{HARDEST_TASK}, {method}: {score:.3f}; {trained_adapters.comparison(HARDEST_TASK)}")
    assert score >= trained_adapters.oracle(HARDEST_TASK) - SLACK


@pytest.mark.slow
def test_batch_of_many_adapters_serves_each_its_task(trained_adapters: TrainedAdapters) -> None:
    tasks = ("reverse", "next", "kana")
    count = 64
    folder = trained_adapters.folder / "adapters"
    folder.mkdir()
    for task in tasks:
        table = trained_adapters.learned(task, METHODS[0], 0)[STEPS]
        card = Card(task, template=PromptTemplate(BEFORE, (len(table),), answer_field="answer"))
        save_adapter(build_adapter(card, table), folder / f"{task}.safetensors")
    words = [record["word"] for record in toy_tasks.records("copy", count, EVALUATION_SEED)]
    requests = [Ask({"word": word}, (task,), max_new_tokens=20) for word in words for task in tasks]
    config = ServerConfig(str(trained_adapters.path), adapters=str(folder), dtype="float64")
    with serving.open_engine(config) as engine:
        batched = [completion.text for completion in engine.generate(requests)]
        separate = [engine.generate([request])[0].text for request in requests[: len(tasks) * 16]]
    assert batched[: len(separate)] == separate
    print("\nadapter", *(f"{task:>8}" for task in toy_tasks.TASKS))
    for index, task in enumerate(tasks):
        task_answers = list(zip(batched[index :: len(tasks)], words, strict=True))
        row = {
            other_task: sum(
                text == toy_tasks.EVERY[other_task](word) for text, word in task_answers
            )
            / count
            for other_task in toy_tasks.TASKS
        }
        print(f"{task:7}", *(f"{share:8.3f}" for share in row.values()))
        assert row.pop(task) >= 0.97
        assert max(row.values()) <= UNTRAINED_SCORE_MAX


@pytest.mark.soak
def test_virtual_tokens_after_the_text_are_compared_with_those_before(
    trained_adapters: TrainedAdapters,
) -> None:
    scores_before = [
        trained_adapters.score(
            HARDEST_TASK, trained_adapters.learned(HARDEST_TASK, METHODS[0], seed)[STEPS]
        )
        for seed in SEEDS
    ]
    table = trained_adapters.learned(HARDEST_TASK, METHODS[0], 0, template=AFTER)[STEPS]
    score_after = trained_adapters.score(HARDEST_TASK, table, template=AFTER)
    print(f"\n{HARDEST_TASK}: before the text {spread(scores_before)}, behind it {score_after:.3f}")
    print(trained_adapters.comparison(HARDEST_TASK))
    # The base was trained with instructions before the text, so a prompt works best there.
    assert min(scores_before) >= score_after - SLACK


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Between peft and transformers.
@pytest.mark.parametrize("method", cases_by_suite(["prompt-tuning"], ["peft-mlp"]))
def test_prompt_tuning_is_as_good_as_peft_after_equal_steps(
    trained_adapters: TrainedAdapters, method: str
) -> None:
    our_tables = trained_adapters.learned(HARDEST_TASK, method, 0)
    peft_tables_ = peft_tables(trained_adapters, trained_adapters.config(HARDEST_TASK, method, 0))
    print(f"\n{HARDEST_TASK}, {method}: {trained_adapters.comparison(HARDEST_TASK)}", end="")
    for step in SAVED_STEPS:
        our_score = trained_adapters.score(HARDEST_TASK, our_tables[step])
        peft_score = trained_adapters.score(HARDEST_TASK, peft_tables_[step])
        print(f"\nafter {step} steps {our_score:.3f}, peft {peft_score:.3f}", end="")
        assert our_score >= peft_score - SLACK


def peft_tables(trained_adapters: TrainedAdapters, config: TuneConfig) -> dict[int, Tensor]:
    """Tables that PEFT trains on the same batches with the same optimizer, from its own start."""
    import peft
    import transformers

    folder = trained_adapters.folder / "hf"
    if not folder.exists():
        convert(
            plan(
                open_checkpoint(trained_adapters.path).in_dtype(torch.float32),
                folder,
                ConversionOptions("hf"),
            )
        )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    common: Any = {"task_type": "CAUSAL_LM", "num_virtual_tokens": VIRTUAL}
    shape: Any = peft.PromptTuningConfig(**common)
    if config.method_config.method != "prompt-tuning":
        shape = peft.PromptEncoderConfig(**common, encoder_hidden_size=model.config.hidden_size)
    training = config.training_config
    torch.manual_seed(training.seed)
    peft_model: Any = peft.get_peft_model(model, shape).train()
    values = [value for value in peft_model.parameters() if value.requires_grad]
    betas = (training.beta1, training.beta2)
    optimizer = torch.optim.AdamW(
        values, config.group_learning_rates[0], betas=betas, weight_decay=0.0
    )
    tables = {}
    for step, batch in enumerate(toy_tasks.batches(trained_adapters.model, config), 1):
        ids = torch.tensor([list(example.ids)[VIRTUAL:] for example in batch])
        labels = ids.clone()
        labels[:, : batch[0].answer_start - VIRTUAL] = -100
        for group in optimizer.param_groups:
            group["lr"] = config.group_learning_rates[0] * learning_rate_factor(step, training)
        peft_model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(values, training.gradient_norm_max)
        optimizer.step()
        optimizer.zero_grad()
        if step in SAVED_STEPS:
            with torch.no_grad():
                tables[step] = peft_model.get_prompt(1)[0].clone()
    return tables
