"""Golden examples travel with an adapter, and tell where it no longer says what it said."""

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
    Golden,
    build_adapter,
    open_adapter,
    save_adapter,
)
from gpt.adapters.card import GOLDEN_MAX
from gpt.adapters.golden_examples import TIE, TOLERANCES, compare, make_golden, replay, tolerance_of
from gpt.adapters.prompt_template import Template
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

TEMPLATE = Template("<|VIRTUAL_PROMPT_0|>{text}{label}", (3,), answer_field="label")
TOKENIZER = NullTokenizer(MODERN.vocab_size)
INPUTS = [{"text": f"{n} {2 * n} {n + 30}", "label": "7"} for n in range(1, 6)]


@cache
def model() -> GPT:
    return build(MODERN)


@cache
def golden_of() -> tuple[Golden, ...]:
    return make_golden(model(), TOKENIZER, an_adapter(), INPUTS)


def an_adapter(golden: tuple[Golden, ...] = (), **card: Any) -> Adapter:
    table = torch.randn(3, MODERN.hidden_size, generator=torch.Generator().manual_seed(1))
    return build_adapter(
        Card("one", template=TEMPLATE, max_new_tokens=6, golden=golden, **card), table
    )


def with_golden(adapter: Adapter, golden: tuple[Golden, ...]) -> Adapter:
    return build_adapter(replace(adapter.card, golden=golden), adapter.table)


def test_examples_are_what_plain_decoding_writes_and_pass_when_replayed() -> None:
    adapter, golden = an_adapter(), golden_of()

    assert len(golden) == len(INPUTS)
    for record, one in zip(INPUTS, golden, strict=True):
        words = [int(word) for word in record["text"].split()]
        virtual = list(range(MODERN.vocab_size, MODERN.vocab_size + 3))
        expected = recompute_greedy(model(), [*virtual, *words], 6, adapter.table)
        assert one.inputs == {"text": record["text"]}  # The answer does not travel as an input.
        assert one.token_ids == tuple(expected.tokens)
        assert one.output == TOKENIZER.decode(expected.tokens, started=True)
    told = replay(model(), TOKENIZER, an_adapter(golden))
    assert (told.checked, told.different, told.ties, told.lines) == (5, 0, 0, ())
    assert told.worst_logprob < 1e-9


def test_examples_pass_in_another_dtype_and_fail_on_another_model() -> None:
    adapter = an_adapter()
    golden = make_golden(build(MODERN, dtype=torch.float32), TOKENIZER, adapter, INPUTS)
    adapter = with_golden(adapter, golden)

    narrow = replay(build(MODERN, dtype=torch.bfloat16), TOKENIZER, adapter)
    other = replay(build(MODERN, dtype=torch.float32, seed=1), TOKENIZER, adapter)
    strict = replay(build(MODERN, dtype=torch.bfloat16), TOKENIZER, adapter, tolerance=1e-9)

    assert narrow.passed and narrow.tolerance == TOLERANCES["bfloat16"]
    assert not other.passed and other.different >= 4
    assert other.lines[0].startswith("example ") and "(was ' " in other.lines[0]
    assert not strict.passed


def test_one_changed_weight_is_seen() -> None:
    changed = build(MODERN)
    weight = dict(changed.named_parameters())["decoder.layers.2.mlp.linear_fc2.weight"]
    with torch.no_grad():
        weight[0, 0] += 3.0
    told = replay(changed, TOKENIZER, an_adapter(golden_of()))
    assert not told.passed


def _replayed(rank: int, size: int, tp: int, golden: tuple[Golden, ...]) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    share = build(MODERN, Mesh.create(tp=tp, pp=size // tp))
    told = replay(share, TOKENIZER, an_adapter(golden))
    again = make_golden(share, TOKENIZER, an_adapter(), INPUTS)
    return told.passed, told.worst_logprob, [one.token_ids for one in again]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_split_model_passes_and_every_rank_hears_the_same(tp: int) -> None:
    golden = golden_of()
    first, second = ranks(2, _replayed, 2, tp, golden)
    assert first == second
    assert first[0] and first[1] < 1e-9
    assert first[2] == [one.token_ids for one in golden]


def test_inputs_that_make_no_example_are_passed_over_and_the_rest_is_bounded() -> None:
    long, wrong = {"text": "1 " * 59}, {"text": "no number"}
    golden = make_golden(model(), TOKENIZER, an_adapter(), [long, wrong, {}, *INPUTS * 9])
    assert len(golden) == GOLDEN_MAX
    assert golden[0].inputs == {"text": INPUTS[0]["text"]}


def test_an_adapter_without_a_template_has_no_examples() -> None:
    bare = build_adapter(Card("bare"), torch.ones(1, MODERN.hidden_size))
    with pytest.raises(AdapterError, match="has no template to make prompts of golden examples"):
        make_golden(model(), TOKENIZER, bare, INPUTS)


THEN = Golden({}, " 5 6", (5, 6), -0.5, "float32")


def scores(*logprobs: float, tops: tuple[tuple[int, float], ...] = ()) -> list[Score]:
    return [Score(logprob, 1, tops) for logprob in logprobs]


@pytest.mark.parametrize(
    ("ids", "found", "result", "why"),
    [
        ((5, 6), scores(-0.2, -0.3), "same", ""),
        ((5, 6), scores(-0.2, -0.3 - 0.0019), "same", ""),
        ((5, 6), scores(-0.2, -0.3 - 0.0021), "different", "off by 0.001"),
        ((5, 6), scores(-0.2, float("nan")), "different", "off by nan"),
        (
            (5, 7),
            scores(-0.2, -0.3, tops=((7, -0.3), (6, -0.303))),
            "tie",
            "token 2 is another, by",
        ),
        ((5, 7), scores(-0.2, -0.3, tops=((7, -0.3), (6, -0.305))), "different", "token 2"),
        ((5, 7), scores(-0.2, -0.3, tops=((7, -0.3), (8, -0.3))), "different", "token 2"),
        ((5, 7), scores(-0.2, -0.3), "different", "token 2 is another"),
        ((5,), scores(-0.2), "different", "it ends after 1 tokens, not 2"),
        ((5,), [], "different", "not finite"),
    ],
)
def test_what_is_the_same_what_a_tie_and_what_different(
    ids: tuple[int, ...], found: list[Score], result: str, why: str
) -> None:
    assert TIE * TOLERANCES["float32"] == pytest.approx(0.004)
    outcome = compare(THEN, "", ids, found, TOLERANCES["float32"])
    assert outcome.result == result and why in outcome.why


def test_an_old_example_of_texts_is_compared_by_its_text() -> None:
    old = Golden({"text": "1"}, "yes")
    assert compare(old, "yes", (1,), [], 0.1).result == "same"
    assert compare(old, "yes.", (1,), [], 0.1).result == "different"


def test_the_tolerance_is_that_of_the_coarsest_dtype() -> None:
    assert tolerance_of((THEN,), "float64") == TOLERANCES["float32"]
    assert tolerance_of((THEN,), "bfloat16") == TOLERANCES["bfloat16"]
    assert tolerance_of((replace(THEN, dtype="bfloat16"),), "float32") == TOLERANCES["bfloat16"]
    assert tolerance_of((replace(THEN, dtype="int3"),), "float16") == TOLERANCES["float16"]


def test_examples_come_back_from_a_file_and_do_not_change_the_digest(tmp_path: Path) -> None:
    plain, more = an_adapter(), an_adapter((THEN, Golden({"text": "1"}, "yes")))
    assert plain.digest == more.digest
    save_adapter(more, tmp_path / "one.safetensors")
    assert open_adapter(tmp_path / "one.safetensors").card == more.card
    assert more.card.to_dict()["golden"][1] == {"inputs": {"text": "1"}, "output": "yes"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: an_adapter((THEN,) * (GOLDEN_MAX + 1)), "33 golden examples; at most 32 travel"),
        (lambda: Golden({}, "", (), -1.0), "of 0 tokens; it needs tokens"),
        (lambda: Golden({}, "", (1,), float("-inf")), "a finite number up to 0"),
        (lambda: Golden({}, "", (-1,)), "a negative token id"),
    ],
)
def test_what_cannot_be_an_example_is_refused(make: Any, said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        make()


# ----------------------------------------------------------------------------- command and server


SHORT = Options(max_new_tokens=3, temperature=0.0)
PASSED = 'preamble_adapter_golden_total{result="passed"}'
FAILED = 'preamble_adapter_golden_total{result="failed"}'


@dataclass
class World:
    """A model, the same one with one weight changed, and an adapter with what each makes of it."""

    good: Path
    changed: Path
    adapter: Adapter  # It does not say of which model it is, as imported ones may not.
    wrong: Adapter  # The same, as if it had been learned on the changed model.


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("golden")
    good = write_checkpoint(folder, tokenizer=False)
    checkpoint = lively(CONFIG)
    tensors = {name: checkpoint.read(name).clone() for name in checkpoint.tensors}
    tensors["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] += 6.0
    write_native((CONFIG, tensors), folder / "changed")
    tokenizer = NullTokenizer(CONFIG.vocab_size)
    table = torch.randn(3, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    plain = build_adapter(Card("task", template=TEMPLATE, max_new_tokens=8), table)
    found = []
    for path in (good, folder / "changed"):
        loaded = load_model(open_checkpoint(path), Mesh.single(), dtype="float64")
        found.append(with_golden(plain, make_golden(loaded, tokenizer, plain, INPUTS)))
    assert found[0].card.golden != found[1].card.golden
    return World(good, folder / "changed", *found)


def refusal(server: Server, adapter: str) -> str:
    """What an ask of the adapter is told; empty: it is answered."""
    try:
        with server.client() as client:
            client.generate({"text": "1 2"}, replace(SHORT, adapter=adapter))
    except CallError as error:
        return f"{error.code} {error.reason} {error}"
    return ""


@pytest.mark.slow
def test_a_strict_server_serves_what_passes_and_nothing_else(world: World, tmp_path: Path) -> None:
    folder, log = tmp_path / "adapters", tmp_path / "log"
    folder.mkdir()
    save_adapter(world.adapter, folder / "task@1.safetensors")
    save_adapter(world.wrong, folder / "wrong@1.safetensors")
    save_adapter(with_golden(world.adapter, ()), folder / "bare@1.safetensors")
    limits = {"adapters": str(folder), "golden": "strict", "adapters_poll_s": 0.2}
    with serving(world.good, tmp_path / "s.yaml", log, **limits) as server:
        with server.client() as client:
            client.generate("1 2 3", SHORT)  # Nobody else waits for the examples.
        assert not refusal(server, "bare")  # There is nothing to check it by.
        eventually(lambda: server.metric(PASSED) == server.metric(FAILED) == 1)
        assert not refusal(server, "task")
        told = refusal(server, "wrong")
        assert "FAILED_PRECONDITION" in told and "ADAPTER_UNUSABLE" in told
        assert "of its 5 golden examples came out otherwise" in told
        with triton.InferenceServerClient(server.address) as other:
            assert other.is_model_ready("task") and not other.is_model_ready("wrong")
            states = {one.name: one.state for one in other.get_model_repository_index().models}
            assert (states["task"], states["wrong"]) == ("READY", "UNAVAILABLE")
        # A later version that does not pass takes nothing from the one that did.
        save_adapter(world.wrong, folder / "task@2.safetensors")
        eventually(lambda: server.metric(FAILED) == 2)
        assert "came out otherwise" in refusal(server, "task@2")
        eventually(lambda: not refusal(server, "task"))
        save_adapter(world.adapter, folder / "task@3.safetensors")
        eventually(lambda: server.metric(PASSED) == 2)
        assert not refusal(server, "task@3")
    said = log.read_text()
    assert "event=adapter_golden_passed adapter=task@1 tenant= checked=5 different=0" in said
    assert "event=adapter_golden_failed adapter=wrong@1 tenant= checked=5 different=" in said


@pytest.mark.slow
def test_a_server_warns_of_a_changed_weight_and_serves(world: World, tmp_path: Path) -> None:
    folder, log = tmp_path / "adapters", tmp_path / "log"
    folder.mkdir()
    save_adapter(world.adapter, folder / "task@1.safetensors")
    # Room for two, of which examples take one at most.
    limits: dict[str, object] = {"adapters": str(folder), "adapters_poll_s": 0.2}
    limits |= {"running_requests_max": 1, "queue_requests_max": 1}
    with serving(world.changed, tmp_path / "s.yaml", log, **limits) as server:
        assert not refusal(server, "task")
        eventually(lambda: server.metric(FAILED) == 1)
        assert not refusal(server, "task") and server.metric(PASSED) == 0
    assert "event=adapter_golden_failed adapter=task@1" in log.read_text()


@pytest.mark.slow
def test_the_command_replays_examples(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "task.safetensors", tmp_path / "wrong.safetensors"
    save_adapter(world.adapter, file)
    save_adapter(world.wrong, other)

    def check(*words: str | Path) -> tuple[int, str, str]:
        code = preamble.main(["adapters", "check", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    code, out, _ = check(file, "--model", world.good)
    assert code == 0 and "good for this model; 5 of 5 golden examples the same" in out
    assert check(file, "--model", world.good, "--dtype", "bfloat16")[0] == 0
    code, out, err = check(file, "--model", world.changed)
    assert code == 1 and "it does not say what it said; " in out and "example 1: " in err
    code, out, _ = check(file, "--model", world.good, "--dtype", "bfloat16", "--tolerance", "1e-6")
    assert code == 1
    code, out, _ = check(file, other, tmp_path / "no.safetensors", "--model", world.good)
    assert code == 1 and [line.split(":")[0] for line in out.splitlines()] == [
        *("task.safetensors", "wrong.safetensors", "no.safetensors")
    ]
    assert ": good for this model; 5 of 5" in out and "no.safetensors: refused: " in out
    code, out, _ = check(file, "--model", world.good, "--json")
    told = json.loads(out)
    assert code == 0 and told["good"] and told["golden"]["checked"] == 5
    assert told["golden"]["worst_logprob"] < told["golden"]["tolerance"] == TOLERANCES["float32"]
    assert check(file, "--dtype", "bfloat16")[0] == 1
