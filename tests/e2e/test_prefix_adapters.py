"""A prefix as its users have it: the file, the commands, and a service that answers with it.

The service's oracle is the text whose keys and values the prefix is: asked as a text it must say
the same.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt
import preamble
import serving
from checkpoints_tools.conversion.convert import write_native
from clients.client import Options
from gpt.adapters.adapter_file import (
    Adapter,
    Card,
    build_adapter,
    check_adapter,
    open_adapter,
    save_adapter,
)
from gpt.adapters.golden_examples import make_golden
from gpt.adapters.prompt_template import Template
from gpt.attention.kv_cache import KVPool
from gpt.checkpoint.digest import identify
from gpt.errors import AdapterError, RequestError
from gpt.formats.registry import open_checkpoint
from gpt.tokenizers.tokenizer import NullTokenizer, open_tokenizer
from serving.config import ServerConfig
from serving.messages import Scored
from serving.request import Ask, Completion
from serving.service.service import Service
from tests.support import prefix_adapters, servers
from tests.support.models import CONFIGS, build, lively
from tests.support.servers import CONFIG, write_checkpoint

NETWORK = CONFIGS["modern"]
LEADS = "<|VIRTUAL_PROMPT_0|>{text}"
HEAD = "when the fox jumps over the lazy dog"
NEW = 8


def made(count: int = 3, **card: Any) -> Adapter:
    return build_adapter(Card("p", kind="prefix", **card), prefix_adapters.drawn(NETWORK, count))


def test_a_prefix_comes_back_as_it_was_saved_and_rows_are_as_they_were(tmp_path: Path) -> None:
    adapter = made(template=Template(LEADS, (3,), bos="text"))
    save_adapter(adapter, tmp_path / "p.safetensors")
    found = open_adapter(tmp_path / "p.safetensors")
    assert (found.card, found.digest) == (adapter.card, adapter.digest)
    assert found.card.hidden_size == NETWORK.prefix_width == 5 * 2 * 2 * 6
    rows = build_adapter(replace(adapter.card, kind="rows"), adapter.table)
    assert rows.digest != adapter.digest
    assert "kind" not in json.loads(rows.card.to_json())
    check_adapter(adapter, NETWORK, None)
    with pytest.raises(AdapterError, match="has rows of 120, the model is 32 wide"):
        check_adapter(rows, NETWORK, None)
    with pytest.raises(AdapterError, match=r"120 numbers for each .*, this model needs 256: keys"):
        check_adapter(adapter, CONFIGS["odd"].with_fields(num_layers=4, num_query_groups=4), None)
    with pytest.raises(AdapterError, match="has the kind 'lora'; known are: rows, prefix"):
        Card("p", kind="lora")


@pytest.mark.parametrize(
    ("text", "splits", "bos"),
    [
        ("Mail: <|VIRTUAL_PROMPT_0|>{text}", (3,), "none"),
        ("{text}<|VIRTUAL_PROMPT_0|>", (3,), "none"),
        ("<|VIRTUAL_PROMPT_1|><|VIRTUAL_PROMPT_0|>{text}", (2, 1), "none"),
        ("<|VIRTUAL_PROMPT_0|>{text}<|VIRTUAL_PROMPT_1|>", (2, 1), "none"),
        (LEADS, (3,), "first"),
    ],
)
def test_a_template_that_puts_anything_before_a_prefix_is_refused(
    text: str, splits: tuple[int, ...], bos: str
) -> None:
    with pytest.raises(AdapterError, match="keys and values of layers can only stand first"):
        made(template=Template(text, splits, bos=bos))
    made(template=Template("<|VIRTUAL_PROMPT_0|><|VIRTUAL_PROMPT_1|>{text}", (2, 1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_a_pool_cannot_hold_does_not_poison_it(dtype: torch.dtype) -> None:
    pool = KVPool(NETWORK, [1, 3], 3, block_tokens=4, dtype=dtype)
    values = torch.full((5, 2, 2, 2, 6), 1e5)
    values[3], values[4] = -3e38, float("inf")
    pool.fill([2, 1], 2, values)
    for layer in (1, 3):
        held = pool.layer(layer)
        assert held.isfinite().all() and not held[0].any()
        assert not held[2, :, :, :2].any() and held[2, :, :, 2:].all()
        assert held[1, :, :, :3].all() and not held[1, :, :, 3:].any()


# --------------------------------------------------------------------------------------- commands


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = preamble.main(["adapters", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_commands_take_a_prefix_in_check_it_and_give_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import safetensors.torch

    model, theirs, file = (tmp_path / name for name in ("model", "theirs", "p.safetensors"))
    write_native(lively(NETWORK), model)
    table = prefix_adapters.drawn(NETWORK, 3)
    theirs.mkdir()
    safetensors.torch.save_file({"prompt_embeddings": table}, theirs / "adapter_model.safetensors")
    config = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    config |= {"num_layers": 5, "token_dim": 12, "num_attention_heads": 2}
    (theirs / "adapter_config.json").write_text(json.dumps(config))

    code, out, _ = run(
        *(capsys, "import", theirs, file, "--model", model, "--template", "{text}"),
        *("--max-new-tokens", "6", "--json"),
    )
    told = json.loads(out)
    assert (code, told["kind"], told["virtual_tokens"]) == (0, "prefix", 3)
    assert told["numbers_a_token"] == NETWORK.prefix_width
    adapter = open_adapter(file)
    assert adapter.card.base_digest == identify(open_checkpoint(model)).digest
    assert torch.equal(adapter.table, table)

    golden = make_golden(
        gpt.load(model), NullTokenizer(NETWORK.vocab_size), adapter, [{"text": "5 6"}]
    )
    save_adapter(build_adapter(replace(adapter.card, golden=golden), table), file)
    code, out, _ = run(capsys, "check", file, "--model", model)
    assert code == 0 and "1 of 1 golden examples the same" in out
    silent = replace(golden[0], inputs={"text": ""})  # Behind a prefix alone nothing is computed.
    save_adapter(build_adapter(replace(adapter.card, golden=(silent,)), table), file)
    code, out, _ = run(capsys, "check", file, "--model", model)
    assert code == 1 and "0 of 1 golden examples the same" in out
    save_adapter(build_adapter(replace(adapter.card, golden=golden), -table), file)
    assert run(capsys, "check", file, "--model", model)[0] == 1

    # Tables of other models that are just as wide: only the config can tell.
    for changes, words in (
        ({"num_layers": 1, "token_dim": 60}, "a model with num_layers 1, this one has 5"),
        ({"num_attention_heads": 4}, "a model with num_attention_heads 4, this one has 2"),
    ):
        (theirs / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        code, _, err = run(capsys, "import", theirs, tmp_path / "no.safetensors", "--model", model)
        assert code == 1 and words in err
    (theirs / "adapter_config.json").write_text(json.dumps(config))

    code, _, err = run(capsys, "export", file, tmp_path / "back", "--to", "peft")
    assert code == 1 and "give its model with --model" in err
    for other, target in (("tgis", "t"), ("nemo", "t.nemo")):
        code, _, err = run(capsys, "export", file, tmp_path / target, "--to", other)
        assert code == 1 and "has no place; export it --to peft" in err
    save_adapter(adapter, file)
    run(capsys, "export", file, tmp_path / "back", "--to", "peft", "--model", model)
    again = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert config.items() <= again.items()
    assert open_adapter(tmp_path / "back").digest == open_adapter(theirs).digest


# ---------------------------------------------------------------------------------------- service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `head`, which is what the model keeps of a text, and `other`, as long and drawn."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint, adapters = open_checkpoint(write_checkpoint(folder)), folder / "adapters"
    adapters.mkdir()
    assert checkpoint.tokenizer is not None
    ids = open_tokenizer(checkpoint.tokenizer).encode(HEAD)
    card = Card("head", kind="prefix", template=Template(LEADS, (len(ids),)))
    card = replace(card, base_digest=identify(checkpoint).digest)
    tables = {
        "head": prefix_adapters.kept(build(CONFIG), ids),
        "other": prefix_adapters.drawn(CONFIG, len(ids)),
    }
    for name, table in tables.items():
        adapter = build_adapter(replace(card, name=name), table)
        save_adapter(adapter, adapters / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    config = ServerConfig(
        str(folder / "checkpoint"),
        adapters=str(folder / "adapters"),
        dtype="float64",
        kv_tokens_max=1024,
        kv_block_tokens=8,
        adapter_rows_max=4,
        speculate_tokens_max=3,
    )
    with serving.open_engine(config) as service:
        yield service


def said(one: Completion) -> tuple[Any, ...]:
    return one.token_ids, one.text, one.finish, one.seed


def numbers(scores: tuple[Scored | None, ...]) -> list[float | None]:
    return [None if one is None else one.logprob for one in scores]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"answers": 2, "temperature": 1.5, "top_p": 0.9, "seed": 3},
        {"beam_width": 3, "answers": 2, "logprobs": 1},
        {"prompt_logprobs": 0},
        {"continuations": ("one and two", "the sum"), "prompt_logprobs": 0, "max_new_tokens": 0},
    ],
)
def test_a_prefix_says_what_its_text_says(service: Service, how: dict[str, Any]) -> None:
    words = " what is the sum of one and two"
    head, ids = service.tokenizer.encode(HEAD), service.tokenizer.encode(words, started=True)
    common = {"temperature": 0.0, "seed": 1, "max_new_tokens": NEW, **how}
    for _ in range(2):  # Then out of the cache.
        found = service.generate([Ask(tuple(ids), ("head",), **common)])
        wanted = service.generate([Ask((*head, *ids), **common)])
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            assert said(mine) == said(theirs)
            assert (mine.virtual_tokens, mine.prompt_tokens) == (
                len(head),
                theirs.prompt_tokens - len(head),
            )
            close = pytest.approx(numbers(theirs.scores), abs=1e-4)
            assert numbers(mine.scores) == close
            told, there = numbers(mine.prompt_scores), numbers(theirs.prompt_scores)
            assert len(told) == len(there)
            known = 0 if "continuations" in how or not told else len(head) + 1
            assert told[:known] == [None] * known
            assert told[known:] == pytest.approx(there[known:], abs=1e-4)


def test_another_prefix_of_that_length_shares_nothing(service: Service) -> None:
    ask = Ask({"text": "the fox"}, ("head",), max_new_tokens=NEW, temperature=0.0)
    first, again, other = service.generate([ask]) + service.generate(
        [ask, replace(ask, adapters=("other",))]
    )
    assert first.token_ids == again.token_ids != other.token_ids
    assert again.cached_tokens >= first.virtual_tokens
    assert other.cached_tokens == 0


@pytest.mark.parametrize("prompt", ["", {"text": ""}])
def test_a_prefix_with_nothing_behind_it_is_refused(service: Service, prompt: Any) -> None:
    with pytest.raises(RequestError, match="is keys and values alone, behind which nothing is"):
        service.generate([Ask(prompt, ("head",), max_new_tokens=2)])


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}])
def test_a_server_of_several_ranks_says_what_its_text_says(
    folder: Path, tmp_path: Path, split: dict[str, int]
) -> None:
    limits: dict[str, Any] = {"adapters": str(folder / "adapters"), "kv_tokens_max": 256, **split}
    with servers.serving(folder / "checkpoint", tmp_path / "s.yaml", **limits) as server:
        with server.client() as client:
            plain = client.generate(f"{HEAD} the fox", Options(max_new_tokens=NEW))
            for adapter in ("head", "other", "head"):
                options = Options(max_new_tokens=NEW, adapters=(adapter,))
                found = client.generate({"text": " the fox"}, options)
                assert (found.token_ids == plain.token_ids) == (adapter == "head")
        assert "preamble_adapter_loads_total 2" in server.get("/metrics")[1]
