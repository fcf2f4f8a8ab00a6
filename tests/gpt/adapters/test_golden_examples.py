"""Golden examples: stored with an adapter, and replayed to detect another model."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import tritonclient.grpc as triton

import preamble
from checkpoints_tools.conversion.convert import write_native
from clients.client import CallError, Options
from gpt.adapters.adapter_file import (
    Adapter,
    Card,
    GoldenExample,
    build_adapter,
    open_adapter,
    save_adapter,
)
from gpt.adapters.card import GOLDEN_EXAMPLES_MAX
from gpt.adapters.golden_examples import (
    TIE_TOLERANCES,
    TOLERANCES,
    compare_example,
    golden_tolerance,
    record_golden_examples,
    replay_golden_examples,
)
from gpt.adapters.prompt_template import PromptTemplate
from gpt.errors import AdapterError
from gpt.formats.registry import open_checkpoint
from gpt.generation.reference_sampler import Score
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import NullTokenizer
from tests.support.models import MODERN, build, lively, recompute_greedy
from tests.support.ranks import ranks
from tests.support.servers import CONFIG, Server, eventually, serving, write_checkpoint

TEMPLATE = PromptTemplate("<|VIRTUAL_PROMPT_0|>{text}{label}", (3,), answer_field="label")
TOKENIZER = NullTokenizer(MODERN.vocab_size)
INPUTS = [{"text": f"{n} {2 * n} {n + 30}", "label": "7"} for n in range(1, 6)]


@cache
def model() -> GPT:
    return build(MODERN)


@cache
def golden_examples() -> tuple[GoldenExample, ...]:
    return record_golden_examples(model(), TOKENIZER, adapter_with(), INPUTS)


def adapter_with(golden: tuple[GoldenExample, ...] = (), **card: Any) -> Adapter:
    table = torch.randn(3, MODERN.hidden_size, generator=torch.Generator().manual_seed(1))
    return build_adapter(
        Card("one", template=TEMPLATE, max_new_tokens=6, golden=golden, **card), table
    )


def add_examples(adapter: Adapter, golden: tuple[GoldenExample, ...]) -> Adapter:
    return build_adapter(replace(adapter.card, golden=golden), adapter.table)


def test_examples_equal_greedy_decoding_and_pass_a_replay() -> None:
    adapter = adapter_with()
    golden = golden_examples()

    assert len(golden) == len(INPUTS)
    for record, example in zip(INPUTS, golden, strict=True):
        prompt_ids = [int(number) for number in record["text"].split()]
        virtual = list(range(MODERN.vocab_size, MODERN.vocab_size + 3))
        expected = recompute_greedy(model(), [*virtual, *prompt_ids], 6, adapter.table)
        assert example.inputs == {"text": record["text"]}  # The answer is not stored as an input.
        assert example.token_ids == tuple(expected.tokens)
        assert example.output == TOKENIZER.decode(expected.tokens, continues_text=True)
    replay = replay_golden_examples(model(), TOKENIZER, adapter_with(golden))
    assert (replay.checked, replay.different, replay.ties, replay.mismatch_lines) == (5, 0, 0, ())
    assert replay.logprob_difference_max < 1e-9


def test_examples_pass_in_another_dtype_and_fail_on_another_model() -> None:
    adapter = adapter_with()
    golden = record_golden_examples(build(MODERN, dtype=torch.float32), TOKENIZER, adapter, INPUTS)
    adapter = add_examples(adapter, golden)

    narrow = replay_golden_examples(build(MODERN, dtype=torch.bfloat16), TOKENIZER, adapter)
    replay_on_other_model = replay_golden_examples(
        build(MODERN, dtype=torch.float32, seed=1), TOKENIZER, adapter
    )
    strict = replay_golden_examples(
        build(MODERN, dtype=torch.bfloat16), TOKENIZER, adapter, tolerance=1e-9
    )

    assert narrow.passed and narrow.tolerance == TOLERANCES["bfloat16"]
    assert not replay_on_other_model.passed and replay_on_other_model.different >= 4
    assert (
        replay_on_other_model.mismatch_lines[0].startswith("example ")
        and "(was ' " in replay_on_other_model.mismatch_lines[0]
    )
    assert not strict.passed


def test_one_changed_weight_fails_the_replay() -> None:
    changed_model = build(MODERN)
    weight = dict(changed_model.named_parameters())["decoder.layers.2.mlp.linear_fc2.weight"]
    with torch.no_grad():
        weight[0, 0] += 3.0
    replay = replay_golden_examples(changed_model, TOKENIZER, adapter_with(golden_examples()))
    assert not replay.passed


def _replayed(rank: int, size: int, tp: int, golden: tuple[GoldenExample, ...]) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    model_shard = build(MODERN, Mesh.create(tp=tp, pp=size // tp))
    replay = replay_golden_examples(model_shard, TOKENIZER, adapter_with(golden))
    recorded = record_golden_examples(model_shard, TOKENIZER, adapter_with(), INPUTS)
    return replay.passed, replay.logprob_difference_max, [example.token_ids for example in recorded]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_replay_passes_with_tensor_parallelism_on_all_ranks(tp: int) -> None:
    golden = golden_examples()
    first_rank, second_rank = ranks(2, _replayed, 2, tp, golden)
    assert first_rank == second_rank
    assert first_rank[0] and first_rank[1] < 1e-9
    assert first_rank[2] == [example.token_ids for example in golden]


def test_unusable_inputs_are_skipped_and_examples_are_limited() -> None:
    too_long = {"text": "1 " * 59}
    invalid = {"text": "no number"}
    golden = record_golden_examples(
        model(), TOKENIZER, adapter_with(), [too_long, invalid, {}, *INPUTS * 9]
    )
    assert len(golden) == GOLDEN_EXAMPLES_MAX
    assert golden[0].inputs == {"text": INPUTS[0]["text"]}


def test_an_adapter_without_a_template_has_no_examples() -> None:
    bare = build_adapter(Card("bare"), torch.ones(1, MODERN.hidden_size))
    with pytest.raises(AdapterError, match="has no template to render golden examples"):
        record_golden_examples(model(), TOKENIZER, bare, INPUTS)


RECORDED = GoldenExample({}, " 5 6", (5, 6), -0.5, "float32")


def scores(*logprobs: float, tops: tuple[tuple[int, float], ...] = ()) -> list[Score]:
    return [Score(logprob, 1, tops) for logprob in logprobs]


@pytest.mark.parametrize(
    ("ids", "scores_of_tokens", "verdict", "reason"),
    [
        ((5, 6), scores(-0.2, -0.3), "same", ""),
        ((5, 6), scores(-0.2, -0.3 - 0.0019), "same", ""),
        (
            (5, 6),
            scores(-0.2, -0.3 - 0.0021),
            "different",
            "differ from the recorded ones by 0.001",
        ),
        ((5, 6), scores(-0.2, float("nan")), "different", "differ from the recorded ones by nan"),
        (
            (5, 7),
            scores(-0.2, -0.3, tops=((7, -0.3), (6, -0.303))),
            "tie",
            "token 2 differs, but the log-probabilities of the recorded and the new token differ",
        ),
        ((5, 7), scores(-0.2, -0.3, tops=((7, -0.3), (6, -0.305))), "different", "token 2"),
        ((5, 7), scores(-0.2, -0.3, tops=((7, -0.3), (8, -0.3))), "different", "token 2"),
        ((5, 7), scores(-0.2, -0.3), "different", "token 2 differs"),
        ((5,), scores(-0.2), "different", "it ends after 1 tokens, not 2"),
        ((5,), [], "different", "not finite"),
    ],
)
def test_replay_verdicts(
    ids: tuple[int, ...], scores_of_tokens: list[Score], verdict: str, reason: str
) -> None:
    assert TIE_TOLERANCES * TOLERANCES["float32"] == pytest.approx(0.004)
    comparison = compare_example(RECORDED, "", ids, scores_of_tokens, TOLERANCES["float32"])
    assert comparison.verdict == verdict and reason in comparison.reason


def test_example_without_token_ids_is_compared_by_text() -> None:
    example = GoldenExample({"text": "1"}, "yes")
    assert compare_example(example, "yes", (1,), [], 0.1).verdict == "same"
    assert compare_example(example, "yes.", (1,), [], 0.1).verdict == "different"


def test_the_tolerance_is_that_of_the_coarsest_dtype() -> None:
    assert golden_tolerance((RECORDED,), "float64") == TOLERANCES["float32"]
    assert golden_tolerance((RECORDED,), "bfloat16") == TOLERANCES["bfloat16"]
    assert (
        golden_tolerance((replace(RECORDED, dtype="bfloat16"),), "float32")
        == TOLERANCES["bfloat16"]
    )
    assert golden_tolerance((replace(RECORDED, dtype="int3"),), "float16") == TOLERANCES["float16"]


def test_examples_are_saved_and_do_not_change_the_digest(tmp_path: Path) -> None:
    plain = adapter_with()
    adapter_with_examples = adapter_with((RECORDED, GoldenExample({"text": "1"}, "yes")))
    assert plain.digest == adapter_with_examples.digest
    save_adapter(adapter_with_examples, tmp_path / "one.safetensors")
    assert open_adapter(tmp_path / "one.safetensors").card == adapter_with_examples.card
    assert adapter_with_examples.card.to_dict()["golden"][1] == {
        "inputs": {"text": "1"},
        "output": "yes",
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: adapter_with((RECORDED,) * (GOLDEN_EXAMPLES_MAX + 1)),
            "33 golden examples; at most 32 are allowed",
        ),
        (lambda: GoldenExample({}, "", (), -1.0), "for 0 tokens; it must be finite"),
        (lambda: GoldenExample({}, "", (1,), float("-inf")), "must be finite and at most 0"),
        (lambda: GoldenExample({}, "", (-1,)), "a negative token id"),
    ],
)
def test_invalid_example_is_refused(make: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        make()


# ----------------------------------------------------------------------------- command and server


SHORT = Options(max_new_tokens=3, temperature=0.0)
PASSED = 'preamble_adapter_golden_total{result="passed"}'
FAILED = 'preamble_adapter_golden_total{result="failed"}'


@dataclass
class GoldenFixture:
    """A model, a copy with one changed weight, and an adapter with golden examples of each."""

    checkpoint: Path
    changed: Path
    adapter: Adapter  # Without a base digest, as imported adapters may be.
    wrong: Adapter  # The same, with the examples of the changed model.


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> GoldenFixture:
    folder = tmp_path_factory.mktemp("golden")
    good = write_checkpoint(folder, tokenizer=False)
    checkpoint = lively(CONFIG)
    tensors = {name: checkpoint.read(name).clone() for name in checkpoint.tensors}
    tensors["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] += 6.0
    write_native((CONFIG, tensors), folder / "changed")
    tokenizer = NullTokenizer(CONFIG.vocab_size)
    table = torch.randn(3, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    plain = build_adapter(Card("task", template=TEMPLATE, max_new_tokens=8), table)
    adapters = []
    for path in (good, folder / "changed"):
        loaded = load_model(open_checkpoint(path), Mesh.single(), dtype="float64")
        adapters.append(
            add_examples(plain, record_golden_examples(loaded, tokenizer, plain, INPUTS))
        )
    assert adapters[0].card.golden != adapters[1].card.golden
    return GoldenFixture(good, folder / "changed", *adapters)


def refusal(server: Server, adapter: str) -> str:
    """The error message of a request with the adapter; empty if it succeeds."""
    try:
        with server.client() as client:
            client.generate({"text": "1 2"}, replace(SHORT, adapter=adapter))
    except CallError as error:
        return f"{error.code} {error.reason} {error}"
    return ""


@pytest.mark.slow
def test_strict_server_refuses_adapters_that_fail(fixture: GoldenFixture, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    log = tmp_path / "log"
    folder.mkdir()
    save_adapter(fixture.adapter, folder / "task@1.safetensors")
    save_adapter(fixture.wrong, folder / "wrong@1.safetensors")
    save_adapter(add_examples(fixture.adapter, ()), folder / "bare@1.safetensors")
    limits = {"adapters": str(folder), "golden": "strict", "adapters_poll_s": 0.2}
    with serving(fixture.checkpoint, tmp_path / "s.yaml", log, **limits) as server:
        with server.client() as client:
            client.generate("1 2 3", SHORT)  # Other requests do not wait for the examples.
        assert not refusal(server, "bare")  # It has no examples to check.
        eventually(lambda: server.metric(PASSED) == server.metric(FAILED) == 1)
        assert not refusal(server, "task")
        message = refusal(server, "wrong")
        assert "FAILED_PRECONDITION" in message and "ADAPTER_UNUSABLE" in message
        assert "of 5 golden examples on this model" in message
        with triton.InferenceServerClient(server.address) as kserve_client:
            assert kserve_client.is_model_ready("task") and not kserve_client.is_model_ready(
                "wrong"
            )
            states = {
                model.name: model.state
                for model in kserve_client.get_model_repository_index().models
            }
            assert (states["task"], states["wrong"]) == ("READY", "UNAVAILABLE")
        # A later version that fails does not affect the version that passed.
        save_adapter(fixture.wrong, folder / "task@2.safetensors")
        eventually(lambda: server.metric(FAILED) == 2)
        assert "golden examples on this model" in refusal(server, "task@2")
        eventually(lambda: not refusal(server, "task"))
        save_adapter(fixture.adapter, folder / "task@3.safetensors")
        eventually(lambda: server.metric(PASSED) == 2)
        assert not refusal(server, "task@3")
    log_text = log.read_text()
    assert "event=adapter_golden_passed adapter=task@1 tenant= checked=5 different=0" in log_text
    assert "event=adapter_golden_failed adapter=wrong@1 tenant= checked=5 different=" in log_text


@pytest.mark.slow
def test_server_that_is_not_strict_warns_and_serves(fixture: GoldenFixture, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    log = tmp_path / "log"
    folder.mkdir()
    save_adapter(fixture.adapter, folder / "task@1.safetensors")
    # Two request slots, of which examples take one at most.
    limits: dict[str, object] = {"adapters": str(folder), "adapters_poll_s": 0.2}
    limits |= {"running_requests_max": 1, "queue_requests_max": 1}
    with serving(fixture.changed, tmp_path / "s.yaml", log, **limits) as server:
        assert not refusal(server, "task")
        eventually(lambda: server.metric(FAILED) == 1)
        assert not refusal(server, "task") and server.metric(PASSED) == 0
    assert "event=adapter_golden_failed adapter=task@1" in log.read_text()


@pytest.mark.slow
def test_the_command_replays_examples(
    fixture: GoldenFixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "task.safetensors"
    failing_adapter = tmp_path / "wrong.safetensors"
    save_adapter(fixture.adapter, file)
    save_adapter(fixture.wrong, failing_adapter)

    def check(*arguments: str | Path) -> tuple[int, str, str]:
        code = preamble.main(["adapters", "check", *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    code, out, _ = check(file, "--model", fixture.checkpoint)
    assert code == 0 and "good for this model; 5 of 5 golden examples match" in out
    assert check(file, "--model", fixture.checkpoint, "--dtype", "bfloat16")[0] == 0
    code, out, err = check(file, "--model", fixture.changed)
    assert code == 1 and "golden examples differ; " in out and "example 1: " in err
    code, out, _ = check(
        file, "--model", fixture.checkpoint, "--dtype", "bfloat16", "--tolerance", "1e-6"
    )
    assert code == 1
    code, out, _ = check(
        file, failing_adapter, tmp_path / "no.safetensors", "--model", fixture.checkpoint
    )
    assert code == 1 and [line.split(":")[0] for line in out.splitlines()] == [
        *("task.safetensors", "wrong.safetensors", "no.safetensors")
    ]
    assert ": good for this model; 5 of 5" in out and "no.safetensors: refused: " in out
    code, out, _ = check(file, "--model", fixture.checkpoint, "--json")
    report = json.loads(out)
    assert code == 0 and report["good"] and report["golden"]["checked"] == 5
    assert (
        report["golden"]["worst_logprob"] < report["golden"]["tolerance"] == TOLERANCES["float32"]
    )
    assert check(file, "--dtype", "bfloat16")[0] == 1
