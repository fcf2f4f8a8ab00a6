"""Prefix adapters end to end: the file, the commands, and a service that serves them.

The oracle of the service is the text whose KV cache the prefix contains: as a prompt it must give
the same tokens.
"""

import json
import re
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
from gpt.adapters.golden_examples import record_golden_examples
from gpt.adapters.prompt_template import PromptTemplate
from gpt.attention.kv_cache import KVPool
from gpt.checkpoint.digest import identify
from gpt.errors import AdapterError, RequestError
from gpt.formats.registry import open_checkpoint
from gpt.tokenizers.tokenizer import NullTokenizer, open_tokenizer
from serving.config import ServerConfig
from serving.messages import TokenScore
from serving.request import Ask, Completion
from serving.service.service import Service
from tests.support import prefix_adapters, servers
from tests.support.models import CONFIGS, build, lively
from tests.support.servers import CONFIG, write_checkpoint

NETWORK = CONFIGS["modern"]
LEADS = "<|VIRTUAL_PROMPT_0|>{text}"
HEAD = "when the fox jumps over the lazy dog"
NEW = 8


def prefix_adapter(count: int = 3, **card: Any) -> Adapter:
    return build_adapter(
        Card("p", kind="prefix", **card), prefix_adapters.draw_prefix_table(NETWORK, count)
    )


def test_prefix_files_round_trip_and_row_files_are_unchanged(tmp_path: Path) -> None:
    adapter = prefix_adapter(template=PromptTemplate(LEADS, (3,), bos="text"))
    save_adapter(adapter, tmp_path / "p.safetensors")
    loaded = open_adapter(tmp_path / "p.safetensors")
    assert (loaded.card, loaded.digest) == (adapter.card, adapter.digest)
    assert loaded.card.hidden_size == NETWORK.prefix_width == 5 * 2 * 2 * 6
    rows = build_adapter(replace(adapter.card, kind="rows"), adapter.table)
    assert rows.digest != adapter.digest
    assert "kind" not in json.loads(rows.card.to_json())
    check_adapter(adapter, NETWORK, None)
    with pytest.raises(
        AdapterError, match="has rows of width 120, but the model has hidden_size 32"
    ):
        check_adapter(rows, NETWORK, None)
    with pytest.raises(AdapterError, match=r"120 values per .*, but this model needs 256: keys"):
        check_adapter(adapter, CONFIGS["odd"].with_fields(num_layers=4, num_query_groups=4), None)
    with pytest.raises(AdapterError, match="has the kind 'lora'; choose one of: rows, prefix"):
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
def test_templates_with_text_before_a_prefix_are_refused(
    text: str, splits: tuple[int, ...], bos: str
) -> None:
    with pytest.raises(AdapterError, match="does not begin with its virtual tokens in order"):
        prefix_adapter(template=PromptTemplate(text, splits, bos=bos))
    prefix_adapter(
        template=PromptTemplate("<|VIRTUAL_PROMPT_0|><|VIRTUAL_PROMPT_1|>{text}", (2, 1))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_prefix_values_beyond_the_pool_dtype_do_not_spread(dtype: torch.dtype) -> None:
    pool = KVPool(NETWORK, [1, 3], 3, block_tokens=4, dtype=dtype)
    values = torch.full((5, 2, 2, 2, 6), 1e5)
    values[3] = -3e38
    values[4] = float("inf")
    pool.write_tokens([2, 1], 2, values)
    for layer in (1, 3):
        layer_kv = pool.layer(layer)
        assert layer_kv.isfinite().all() and not layer_kv[0].any()
        assert not layer_kv[2, :, :, :2].any() and layer_kv[2, :, :, 2:].all()
        assert layer_kv[1, :, :, :3].all() and not layer_kv[1, :, :, 3:].any()


# --------------------------------------------------------------------------------------- commands


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = preamble.main(["adapters", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_commands_import_check_and_export_a_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import safetensors.torch

    model, peft_folder, file = (tmp_path / name for name in ("model", "theirs", "p.safetensors"))
    write_native(lively(NETWORK), model)
    table = prefix_adapters.draw_prefix_table(NETWORK, 3)
    peft_folder.mkdir()
    safetensors.torch.save_file(
        {"prompt_embeddings": table}, peft_folder / "adapter_model.safetensors"
    )
    config = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    config |= {"num_layers": 5, "token_dim": 12, "num_attention_heads": 2}
    (peft_folder / "adapter_config.json").write_text(json.dumps(config))

    code, out, _ = run(
        capsys,
        "import",
        peft_folder,
        file,
        "--model",
        model,
        "--template",
        "{text}",
        "--max-new-tokens",
        "6",
        "--json",
    )
    report = json.loads(out)
    assert (code, report["kind"], report["virtual_tokens"]) == (0, "prefix", 3)
    assert report["numbers_a_token"] == NETWORK.prefix_width
    adapter = open_adapter(file)
    assert adapter.card.base_digest == identify(open_checkpoint(model)).digest
    assert torch.equal(adapter.table, table)

    golden = record_golden_examples(
        gpt.load(model), NullTokenizer(NETWORK.vocab_size), adapter, [{"text": "5 6"}]
    )
    save_adapter(build_adapter(replace(adapter.card, golden=golden), table), file)
    code, out, _ = run(capsys, "check", file, "--model", model)
    assert code == 0 and "1 of 1 golden examples match" in out
    empty_input = replace(
        golden[0], inputs={"text": ""}
    )  # An empty prompt after a prefix computes nothing.
    save_adapter(build_adapter(replace(adapter.card, golden=(empty_input,)), table), file)
    code, out, _ = run(capsys, "check", file, "--model", model)
    assert code == 1 and "0 of 1 golden examples match" in out
    save_adapter(build_adapter(replace(adapter.card, golden=golden), -table), file)
    assert run(capsys, "check", file, "--model", model)[0] == 1

    # Tables of other models of the same width: only the config can tell.
    for changes, message_words in (
        ({"num_layers": 1, "token_dim": 60}, "a model with num_layers 1, but this model has 5"),
        ({"num_attention_heads": 4}, "a model with num_attention_heads 4, but this model has 2"),
    ):
        (peft_folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        code, _, err = run(
            capsys, "import", peft_folder, tmp_path / "no.safetensors", "--model", model
        )
        assert code == 1 and message_words in err
    (peft_folder / "adapter_config.json").write_text(json.dumps(config))

    code, _, err = run(capsys, "export", file, tmp_path / "back", "--to", "peft")
    assert code == 1 and "give the base model with --model" in err
    for format_name, target in (("tgis", "t"), ("nemo", "t.nemo")):
        code, _, err = run(capsys, "export", file, tmp_path / target, "--to", format_name)
        assert code == 1 and "does not support; export it with --to peft" in err
    save_adapter(adapter, file)
    run(capsys, "export", file, tmp_path / "back", "--to", "peft", "--model", model)
    exported_config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert config.items() <= exported_config.items()
    assert open_adapter(tmp_path / "back").digest == open_adapter(peft_folder).digest


# ---------------------------------------------------------------------------------------- service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With adapters `head`, the KV cache of a text, and `other`, random and as long."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint = open_checkpoint(write_checkpoint(folder))
    adapters = folder / "adapters"
    adapters.mkdir()
    assert checkpoint.tokenizer is not None
    ids = open_tokenizer(checkpoint.tokenizer).encode(HEAD)
    card = Card("head", kind="prefix", template=PromptTemplate(LEADS, (len(ids),)))
    card = replace(card, base_digest=identify(checkpoint).digest)
    tables = {
        "head": prefix_adapters.kv_of_text(build(CONFIG), ids),
        "other": prefix_adapters.draw_prefix_table(CONFIG, len(ids)),
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


def summary(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish, completion.seed


def numbers(scores: tuple[TokenScore | None, ...]) -> list[float | None]:
    return [None if score is None else score.logprob for score in scores]


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
def test_prefix_gives_the_tokens_of_its_text(service: Service, how: dict[str, Any]) -> None:
    text = " what is the sum of one and two"
    head = service.tokenizer.encode(HEAD)
    ids = service.tokenizer.encode(text, continues_text=True)
    common = {"temperature": 0.0, "seed": 1, "max_new_tokens": NEW, **how}
    for _ in range(2):  # The second time from the prefix cache.
        with_prefix = service.generate([Ask(tuple(ids), ("head",), **common)])
        with_text = service.generate([Ask((*head, *ids), **common)])
        assert len(with_prefix) == len(with_text)
        for prefix_completion, text_completion in zip(with_prefix, with_text, strict=True):
            assert summary(prefix_completion) == summary(text_completion)
            assert (prefix_completion.virtual_tokens, prefix_completion.prompt_tokens) == (
                len(head),
                text_completion.prompt_tokens - len(head),
            )
            close = pytest.approx(numbers(text_completion.scores), abs=1e-4)
            assert numbers(prefix_completion.scores) == close
            prefix_logprobs = numbers(prefix_completion.prompt_scores)
            text_logprobs = numbers(text_completion.prompt_scores)
            assert len(prefix_logprobs) == len(text_logprobs)
            first_scored = 0 if "continuations" in how or not prefix_logprobs else len(head) + 1
            assert prefix_logprobs[:first_scored] == [None] * first_scored
            assert prefix_logprobs[first_scored:] == pytest.approx(
                text_logprobs[first_scored:], abs=1e-4
            )


def test_prefixes_of_equal_length_share_no_cache(service: Service) -> None:
    ask = Ask({"text": "the fox"}, ("head",), max_new_tokens=NEW, temperature=0.0)
    prefix_answer, repeated, other = service.generate([ask]) + service.generate(
        [ask, replace(ask, adapters=("other",))]
    )
    assert prefix_answer.token_ids == repeated.token_ids != other.token_ids
    assert repeated.cached_tokens >= prefix_answer.virtual_tokens
    assert other.cached_tokens == 0


@pytest.mark.parametrize("prompt", ["", {"text": ""}])
def test_empty_prompts_after_a_prefix_are_refused(service: Service, prompt: Any) -> None:
    with pytest.raises(RequestError, match="is a prefix of keys and values, which yields no"):
        service.generate([Ask(prompt, ("head",), max_new_tokens=2)])


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}])
def test_prefix_gives_the_tokens_of_its_text_on_several_ranks(
    folder: Path, tmp_path: Path, split: dict[str, int]
) -> None:
    limits: dict[str, Any] = {"adapters": str(folder / "adapters"), "kv_tokens_max": 256, **split}
    with servers.serving(folder / "checkpoint", tmp_path / "s.yaml", **limits) as server:
        with server.client() as client:
            plain = client.generate(f"{HEAD} the fox", Options(max_new_tokens=NEW))
            for adapter in ("head", "other", "head"):
                options = Options(max_new_tokens=NEW, adapters=(adapter,))
                completion = client.generate({"text": " the fox"}, options)
                assert (completion.token_ids == plain.token_ids) == (adapter == "head")
        metrics = server.get("/metrics")[1]
        assert re.search(r"^preamble_adapter_loads_total\{.*\} 2(\.0)?$", metrics, re.MULTILINE)
