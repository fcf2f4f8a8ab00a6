"""Tuning, from a YAML file to an adapter that is served: what is learned, and what is refused."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

import gpt
from clients.generation import Options
from gpt.adapter import open_adapter
from gpt.checkpoint import open_checkpoint
from gpt.digest import identify
from gpt.generate import generate
from gpt.model import GPT
from gpt.sampling import Sampling
from gpt.tokenizer import open_tokenizer
from ptuning.__main__ import main
from ptuning.config import TuneConfig
from ptuning.dataset import Example
from ptuning.train import Progress, answer_loss, initial_table, tune
from tests.models import CLASSIC, MODERN, build
from tests.servers import ROOT, WAIT_S, command, serving, write_checkpoint

ANSWER = " dog"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ptuning"))


def records(count: int) -> list[dict[str, str]]:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    return [
        {"prompt": " ".join(words[n % 9 : n % 9 + 1 + n % 4]), "completion": ANSWER}
        for n in range(count)
    ]


def write_settings(folder: Path, checkpoint: Path, **changes: object) -> Path:
    """A run of seconds, in its own folder."""
    adapters = folder / "adapters"
    adapters.mkdir(exist_ok=True)
    lines = [json.dumps(record) for record in records(40)]
    (folder / "examples.jsonl").write_text("\n".join(lines))
    settings: dict[str, object] = {
        "model": str(checkpoint),
        "data": str(folder / "examples.jsonl"),
        "name": "answer",
        "output": str(adapters),
        "virtual_tokens": 16,
        "steps": 80,
        "learning_rate": 0.5,
        "dtype": "float64",
        "max_new_tokens": 20,
    }
    file = folder / "tune.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return file


def test_an_adapter_is_learned_written_and_served(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = identify(open_checkpoint(checkpoint))

    assert main(["tune", str(write_settings(tmp_path, checkpoint))]) == 0

    written = Path(capsys.readouterr().out.strip())
    assert written == tmp_path / "adapters" / "answer@1.safetensors"
    assert identify(open_checkpoint(checkpoint)) == before
    adapter = open_adapter(written)
    assert adapter.card.base_digest == before.digest
    assert adapter.card.metrics["loss"] < 0.1 * adapter.card.metrics["first_loss"]
    model = gpt.load(checkpoint, dtype="float64")
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    rule = Sampling(max_new_tokens=20, stop_token_ids=tokenizer.stop_ids)
    settings = tmp_path / "serve.yaml"
    with (
        serving(checkpoint, settings, adapters=str(written.parent)) as server,
        server.client() as client,
    ):
        right = 0
        for prompt in (record["prompt"] for record in records(9)):
            ids = [*range(640, 656), *tokenizer.encode(prompt)]
            expected = generate(model, [ids], rule, table=adapter.table)[0]
            answer = client.generate({"prompt": prompt}, Options(adapter="answer"))
            assert answer.token_ids == expected.token_ids
            right += answer.text == ANSWER and answer.finish_reason == "stop"
            without = client.generate(prompt, Options(max_new_tokens=20))
            assert without.text != ANSWER
        assert right >= 6

    assert main(["tune", str(write_settings(tmp_path, checkpoint, steps=1))]) == 0
    assert capsys.readouterr().out.strip().endswith("answer@2.safetensors")


EXAMPLES = [Example([101, 102, 5, 6, 7], 4), Example([101, 102, 9, 3, 1, 2, 8], 3)]


def run(model: GPT, seed: int = 0, steps: int = 100) -> tuple[Tensor, list[float]]:
    config = TuneConfig("m", "d", "n", steps=steps, batch_examples=2, learning_rate=0.1, seed=seed)
    losses: list[float] = []

    def report(progress: Progress) -> None:
        losses.append(progress.loss)

    return tune(model, initial_table(model, 2, [], seed), EXAMPLES, config, report), losses


def test_the_loss_falls_and_the_model_stays_as_it_was_to_the_last_bit() -> None:
    model = build(CLASSIC)
    before = {name: value.clone() for name, value in model.named_parameters()}

    table, losses = run(model)

    assert losses[-1] < 0.5 * losses[0]
    assert table.dtype == torch.float32
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name
        assert value.grad is None, name


def test_the_same_seed_learns_the_same_table() -> None:
    model = build(CLASSIC)
    tables = [run(model, seed, steps=10)[0] for seed in (3, 3, 4)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


@pytest.mark.parametrize("config", [CLASSIC, MODERN], ids=["classic", "modern"])
def test_the_loss_of_a_ragged_batch_is_the_plain_one_over_answers_alone(
    config: gpt.config.GPTConfig,
) -> None:
    model = build(config)
    shift = config.vocab_size - CLASSIC.vocab_size  # Ids of EXAMPLES are for CLASSIC's vocabulary.
    examples = [
        Example([*(token + shift for token in one.ids[:2]), *one.ids[2:]], one.answer_start)
        for one in EXAMPLES
    ]
    tables = [torch.randn(2, 32, dtype=torch.float64, generator=seeded()) for _ in range(2)]
    for table in tables:
        table.requires_grad_()

    loss = answer_loss(model, examples, tables[0])
    plain = plain_loss(model, examples, tables[1])
    loss.backward()
    plain.backward()

    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tables[0].grad, tables[1].grad, rtol=1e-10, atol=1e-12)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def plain_loss(model: GPT, examples: Sequence[Example], table: Tensor) -> Tensor:
    """One example at a time, logits everywhere."""
    losses = []
    for example in examples:
        logits = model.logits(torch.tensor([example.ids]), table)[0]
        answer = torch.tensor(example.ids[example.answer_start :])
        losses.append(
            F.cross_entropy(logits[example.answer_start - 1 : -1], answer, reduction="none")
        )
    return torch.cat(losses).mean()


def test_the_table_starts_as_rows_of_the_vocabulary() -> None:
    model = build(CLASSIC, dtype=torch.float32)
    words = model.embedding.rows if model.embedding is not None else torch.empty(0)
    assert torch.equal(initial_table(model, 3, [7, 9], 0), words[[7, 9, 7]])
    drawn = initial_table(model, 3, [], 0)
    assert all((words == row).all(dim=1).any() for row in drawn)


BAD: dict[str, tuple[dict[str, object], str | None, str]] = {
    "unknown key": ({"learning_rte": 1}, None, "did you mean 'learning_rate'"),
    "wrong type": ({"steps": "many"}, None, "steps is 'many'; it must be a whole number"),
    "out of range": ({"steps": 0}, None, "steps is 0"),
    "no room": ({"tokens_max": 0}, None, "tokens_max is 0; it must be more than 0"),
    "no answer": ({"max_new_tokens": 0}, None, "max_new_tokens is 0; it must be more than 0"),
    "no rate": ({"learning_rate": float("inf")}, None, "learning_rate is inf; it must be more"),
    "a negative seed": ({"seed": -1}, None, "seed is -1; it must not be negative"),
    "a large seed": ({"seed": 2**63}, None, "seed is 9223372036854775808; it must fit into 64"),
    "a large decay": ({"weight_decay": 1e30}, None, "weight_decay is 1e+30; it must be less"),
    "too many rows": ({"virtual_tokens": 10**7}, None, "virtual_tokens is 10000000; this model"),
    "an empty stop": ({"stop": ["a", ""]}, None, "a stop of 0 bytes; each needs 1 to 256"),
    "a long stop": ({"stop": ["x" * 257]}, None, "a stop of 257 bytes"),
    "half a character": ({"task": "\ud800"}, None, "half a character"),
    "half a text": ({"initial_text": "\ud800"}, None, "initial_text: "),
    "half a path": ({"data": "\ud800"}, None, "data is '\\ud800'; it must be a path"),
    "an end in a path": ({"model": "a\0b"}, None, "model is 'a\\x00b'; it must be a path"),
    "no output": ({"output": ""}, None, "output is ''; it must be a path"),
    "a file above": ({"output": "README.md/a"}, None, "cannot take an adapter: Not a directory"),
    "a closed directory": ({"output": "/proc/self"}, None, "output: /proc/self cannot take an"),
    "a device": ({"device": "nope"}, None, "device 'nope' cannot be used"),
    "no device": ({"device": "meta"}, None, "device is 'meta'; known are"),
    "a device that is absent": ({"device": "cuda:99"}, None, "device 'cuda:99' cannot be used"),
    "splits": ({"splits": [1, 2]}, None, "must sum to virtual_tokens"),
    "no directory": ({"output": "README.md"}, None, "README.md is not a directory"),
    "a version": ({"name": "a@2"}, None, "leave the version out"),
    "a path": ({"name": "../a"}, None, "no adapter's name"),
    "no data": ({"data": "nothing.jsonl"}, None, "nothing.jsonl cannot be read"),
    "empty data": ({}, "", "no usable example"),
    "not JSON": ({}, '{"prompt": "a", "completion": "b"}\n{', "line 2: not JSON"),
    "no object": ({}, "[1]", "line 1: a list"),
    "a missing field": ({}, '{"prompt": "a"}', "line 1: no field 'completion'"),
    "a deep line": ({}, "[" * 100_000, "line 1: nested too deeply"),
    "a long line": ({}, json.dumps({"prompt": ["a" * 10**6] * 9}), "'prompt' is ['aaa"),
    "half a line": ({}, '{"prompt": "\\ud800", "completion": "b"}', "no usable example"),
    "a number": ({}, '{"prompt": "a", "completion": 3}', "'completion' is 3"),
    "too long": ({"tokens_max": 6}, '{"prompt": "a", "completion": "b c d e"}', "over the limit"),
    "a dtype": ({"dtype": "float8"}, None, "dtype is 'float8'"),
    "a template": ({"template": "{prompt}{completion}"}, None, "virtual prompts"),
    "no model": ({"model": "nowhere"}, None, "does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(
    case: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, lines, words = BAD[case]
    file = write_settings(tmp_path, checkpoint, **changes)
    if lines is not None:
        (tmp_path / "examples.jsonl").write_text(lines)

    for extra in ([], ["--check"]):
        assert main(["tune", str(file), *extra]) == 1

        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert len(err) < 600
        assert words in err
    assert list((tmp_path / "adapters").iterdir()) == []


def test_a_number_without_a_dot_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    file.write_text("model: m\ndata: d\nname: n\nlearning_rate: 1e-3\n")
    assert TuneConfig.read(str(file)).learning_rate == 0.001


def test_a_batch_is_at_most_all_examples() -> None:
    model, table = build(CLASSIC), torch.zeros(2, 32)
    tokens = []
    config = TuneConfig("m", "d", "n", steps=1, batch_examples=10**9)
    tune(model, table, EXAMPLES, config, lambda made: tokens.append(made.tokens))
    assert tokens == [sum(len(example.ids) for example in EXAMPLES)]


def test_check_shows_examples_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(write_settings(tmp_path, checkpoint)), "--check"]) == 0

    shown = capsys.readouterr().out
    assert "prompt (17 tokens): '<16 virtual>the'" in shown
    assert f"{ANSWER!r}" in shown
    assert "40 examples" in shown
    assert list((tmp_path / "adapters").iterdir()) == []


def test_an_interrupted_run_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    file = write_settings(tmp_path, checkpoint, steps=100_000)
    process = subprocess.Popen(
        command("tune", file),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "tuning" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert list((tmp_path / "adapters").iterdir()) == []
