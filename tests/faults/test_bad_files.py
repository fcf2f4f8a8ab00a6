"""Bad files: settings, checkpoints, adapter cards, tokenizers and templates with wrong values.

Each is refused within a second, by an error that names the field. Values that look wrong but are
accepted on purpose are in `ACCEPTED`, each with its reason.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import get_args, get_origin

import pytest
import yaml

import preamble
from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.card import Card
from gpt.checkpoint.files.file_tree import scan_folder_recursive
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from gpt.formats.registry import open_checkpoint
from gpt.settings import setting_types
from gpt.tokenizers.tokenizer import open_tokenizer
from serving.config import ServerConfig
from tests.support.broken.bad_values import BadValue, Values, bad_values
from tests.support.models import CLASSIC, MODERN, lively
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import CONFIG
from tests.support.trained_tokenizers import sentencepiece_model

SECONDS_MAX = 1.0
GROWTH_MAX = 256 << 20

NO_NUMBER: Values = {
    "a text": "two",
    "a list": [1],
    "an object": {"a": 1},
    "a boolean": True,
    "not a number": float("nan"),
    "infinite": float("inf"),
    "negative infinity": float("-inf"),
}
SIZE: Values = {
    **NO_NUMBER,
    "zero": 0,
    "negative": -1,
    "a fraction": 1.5,
    "10^9": 10**9,
    "10^12": 10**12,
    "over 64 bits": 2**64,
    "400 digits": 10**400,
}
OPTIONAL_SIZE: Values = {kind: value for kind, value in SIZE.items() if kind != "zero"}
FLAG: Values = {"a text": "yes", "a number": 2, "a list": [True], "an object": {}}
TEXT: Values = {"a number": 5, "a list": ["a"], "an object": {}, "a boolean": True}
EPSILON: Values = {**NO_NUMBER, "zero": 0, "negative": -1e-5, "above 1": 2.0, "400 digits": 10**400}
DROPOUT: Values = {**NO_NUMBER, "negative": -0.1, "one": 1.0, "above 1": 1.5}

# Values that are accepted, by (surface, cause), with the reason.
ACCEPTED: dict[tuple[str, str], str] = {
    **{
        (
            surface,
            "max_position_embeddings: 10^9",
        ): "rotary positions need no table"
        for surface in ("override", "llama", "mistral", "qwen2")
    },
    **{
        (surface, "sliding_window: 10^9"): "a window may be larger than the context"
        for surface in ("mistral", "qwen2")
    },
}


def violations(
    surface: str, values: Iterator[BadValue], read: Callable[[BadValue], object]
) -> list[str]:
    """Read each bad value; return what is wrong with the errors."""
    wrong = []
    before = anonymous_bytes()
    for bad in values:
        started = time.monotonic()
        try:
            read(bad)
        except PreambleError as error:
            # A valid size is refused because the weights have another one.
            is_named = bad.field in str(error) or "the weights" in str(error)
            if not is_named:
                wrong.append(f"{bad.cause}: does not name the field: {error}"[:300])
        except Exception as error:
            wrong.append(f"{bad.cause}: {error!r}"[:300])
        else:
            if (surface, bad.cause) not in ACCEPTED:
                wrong.append(f"{bad.cause}: accepted")
        if time.monotonic() - started > SECONDS_MAX:
            wrong.append(f"{bad.cause}: took {time.monotonic() - started:.1f} s")
        if anonymous_bytes() - before > GROWTH_MAX:
            wrong.append(f"{bad.cause}: takes {(anonymous_bytes() - before) >> 20} MiB")
    return wrong


def check(surface: str, values: Iterator[BadValue], read: Callable[[BadValue], object]) -> None:
    wrong = violations(surface, values, read)
    assert not wrong, "\n".join([f"{len(wrong)} violations", *wrong])


def _settings() -> Mapping[str, Values]:
    """Bad values of each setting of a server, by its type."""
    by_type: dict[type, Values] = {
        int: {
            key: SIZE[key]
            for key in SIZE
            # Zero turns some limits off, and some may be large.
            if key not in ("zero", "10^9", "10^12")
        },
        float: {**NO_NUMBER, "negative": -1.0},
        bool: FLAG,
        str: TEXT,
    }
    tables = {}
    for key, hint in setting_types(ServerConfig).items():
        members = (hint,) if get_origin(hint) in (None, tuple) else get_args(hint)
        plain = next((member for member in members if member in by_type), None)
        if plain is not None and key != "model":
            tables[key] = by_type[plain]
    return tables


def read_settings(path: Path, bad: BadValue) -> ServerConfig:
    path.write_text(yaml.safe_dump({"model": "m", bad.field: bad.value}))
    return ServerConfig.read(str(path), {})


def test_a_bad_setting_is_refused_by_name(tmp_path: Path) -> None:
    check("settings", bad_values(_settings()), partial(read_settings, tmp_path / "s.yaml"))


LARGE_SETTINGS = {
    "tp": 10**6,
    "pp": 10**6,
    "kv_block_tokens": 10**9,
    "running_requests_max": 10**8,
    "step_tokens_max": 10**10,
    "message_bytes_max": 2**40,
    "flight_steps_max": 10**9,
    "adapter_rows_max": 10**12,
    "connection_age_s": 1e12,
    "adapters_poll_s": 1e-9,
    "secrets_poll_s": 1e-9,
    "port": 70_000,
    "logprobs_max": 10**6,
    "uploads_max": 10**6,
    "queue_requests_max": 10**12,
}


def test_settings_have_upper_bounds(tmp_path: Path) -> None:
    values = (BadValue(key, "too large", value) for key, value in LARGE_SETTINGS.items())
    check("settings", values, partial(read_settings, tmp_path / "s.yaml"))


GPT_FIELDS: Mapping[str, Values] = {
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"),
        SIZE,
    ),
    "max_position_embeddings": SIZE,
    "ffn_hidden_size": OPTIONAL_SIZE,
    "num_query_groups": OPTIONAL_SIZE,
    "kv_channels": {**OPTIONAL_SIZE, "odd": 7},
    "position_embedding_type": {**TEXT, "an unknown name": "sinus"},
    "rotary_percent": {**NO_NUMBER, "zero": 0, "negative": -0.5, "above 1": 1.5},
    "rotary_base": {**NO_NUMBER, "zero": 0, "negative": -1, "below 1": 0.5, "10^40": 1e40},
    "rotary_interleaved": FLAG,
    "rope_scaling": {
        "a text": "linear",
        "a list": [1],
        "no factor": {"kind": "linear"},
        "an unknown kind": {"kind": "cubic", "factor": 2.0},
        "factor zero": {"kind": "linear", "factor": 0},
        "a negative factor": {"kind": "linear", "factor": -2.0},
        "factor not a number": {"kind": "linear", "factor": float("nan")},
        "a text for factor": {"kind": "linear", "factor": "two"},
        "an unknown key": {"kind": "linear", "factor": 2.0, "beta": 1},
        "equal limits": {
            "kind": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
        },
        "no original context": {
            "kind": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 0,
        },
    },
    "normalization": {**TEXT, "an unknown name": "BatchNorm"},
    "layernorm_epsilon": EPSILON,
    "layernorm_zero_centered_gamma": FLAG,
    "activation": {**TEXT, "an unknown name": "step"},
    "gated": FLAG,
    "qkv_bias": FLAG,
    "untie_embeddings_and_output_weights": FLAG,
    "parallel_residual": FLAG,
    "window_size": {**NO_NUMBER, "zero": 0, "negative": -1, "a fraction": 1.5, "10^12": 10**12},
    "num_experts": OPTIONAL_SIZE,
    "moe_router_topk": {**NO_NUMBER, "negative": -1, "a fraction": 1.5},
    "moe_layers": {"a text": "all", "too many": [True] * 50, "numbers": [1] * 5},
    "moe_router_score_function": {**TEXT, "an unknown name": "argmax"},
    "moe_router_topk_scaling_factor": {**NO_NUMBER, "zero": 0, "negative": -1},
    "hidden_dropout": DROPOUT,
    "attention_dropout": DROPOUT,
    "dtype": {**TEXT, "an unknown name": "int3"},
    "unheard_of": {"an unknown field": 1},
}


def test_a_bad_field_of_a_native_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    write_native(lively(CLASSIC), tmp_path / "model")
    manifest = tmp_path / "model" / "preamble.json"
    record = json.loads(manifest.read_text())

    def read(bad: BadValue) -> object:
        config = {**record["config"], bad.field: bad.value}
        manifest.write_text(json.dumps({**record, "config": config}))
        return open_checkpoint(tmp_path / "model")

    check("native", bad_values(GPT_FIELDS), read)


def test_a_bad_override_is_refused_by_name(tmp_path: Path) -> None:
    """`--config-json`, for a checkpoint of any format."""
    write_native(lively(MODERN), tmp_path / "model")

    def read(bad: BadValue) -> object:
        return open_checkpoint(tmp_path / "model", {bad.field: bad.value})

    fields = {key: values for key, values in GPT_FIELDS.items() if key != "rope_scaling"}
    check("override", bad_values(fields), read)


HUGGINGFACE_FIELDS: Mapping[str, Values] = {
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
            "intermediate_size",
        ),
        SIZE,
    ),
    "num_key_value_heads": OPTIONAL_SIZE,
    "head_dim": {**OPTIONAL_SIZE, "odd": 7},
    "rms_norm_eps": EPSILON,
    "rope_theta": {**NO_NUMBER, "zero": 0, "negative": -1, "below 1": 0.5, "10^40": 1e40},
    "rope_scaling": {
        "a text": "linear",
        "a list": [1],
        "an unknown type": {"rope_type": "cubic", "factor": 2.0},
        "no factor": {"rope_type": "linear"},
        "factor zero": {"rope_type": "linear", "factor": 0},
        "a negative factor": {"rope_type": "linear", "factor": -1},
        "factor not a number": {"rope_type": "linear", "factor": float("nan")},
        "a text for factor": {"rope_type": "linear", "factor": "two"},
        "no frequencies": {"rope_type": "llama3", "factor": 2.0},
    },
    "sliding_window": OPTIONAL_SIZE,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "attention_dropout": DROPOUT,
    "hidden_act": {**TEXT, "an unknown name": "step"},
    "eos_token_id": {
        "a text": "end",
        "negative": -5,
        "a fraction": 1.5,
        "a list of texts": ["end"],
        "a negative id in a list": [1, -1],
        "a boolean": True,
    },
    "model_type": {**TEXT, "an unknown name": "rnn"},
    "quantization_config": {"a mapping": {"quant_method": "gptq"}},
    "layer_types": {"a number": 5, "an unknown name": ["linear_attention"] * 5},
}
# Keys that transformers ignores in the family.
IGNORED_KEYS = {
    "llama": ("sliding_window", "layer_types"),
    "mistral": ("attention_bias", "mlp_bias"),
    "qwen2": ("attention_bias", "mlp_bias"),
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_bad_field_of_config_json_is_refused_by_name(family: str, tmp_path: Path) -> None:
    source = MODERN.with_fields(
        moe_layers=(),
        rotary_percent=1.0,
        qk_layernorm=False,
        qkv_bias=family == "qwen2",
        window_size=None,
        layernorm_epsilon=1e-6,
    )
    write_native(lively(source), tmp_path / "native")
    arguments = ["convert", str(tmp_path / "native"), str(tmp_path / "hf"), "--to", "hf"]
    assert preamble.main(arguments) == 0
    path = tmp_path / "hf" / "config.json"
    record = json.loads(path.read_text())
    record["model_type"] = family

    def read(bad: BadValue) -> object:
        changed = {**record, bad.field: bad.value}
        if bad.field in ("rope_theta", "rope_scaling"):
            changed.pop("rope_parameters", None)
        path.write_text(json.dumps(changed))
        return open_checkpoint(tmp_path / "hf")

    fields = {
        key: values
        for key, values in HUGGINGFACE_FIELDS.items()
        if key not in IGNORED_KEYS.get(family, ())
    }
    check(family, bad_values(fields), read)


def test_values_of_real_models_are_accepted() -> None:
    """Values that occur in released models, and that look unusual."""
    for fields in (
        {"window_size": None},
        {"rotary_base": 1e11},
        {"rotary_base": 5e6, "max_position_embeddings": 10_485_760},
        {"layernorm_epsilon": 1e-12},
        {"rotary_percent": 0.25},
        {"kv_channels": 256, "hidden_size": 33, "num_attention_heads": 4},
        {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"num_layers": 61, "num_experts": 384, "moe_router_topk": 8},
        {"num_layers": 15, "num_experts": 2048, "moe_router_topk": 1},
    ):
        base = {**CONFIG.to_dict(), "moe_layers": (), "ffn_hidden_size": 0, "kv_channels": 0}
        GPTConfig.from_dict({**base, **fields})


CARD: Mapping[str, Values] = {
    "name": {**TEXT, "empty": "", "a path": "../a", "spaces": "a b", "a long name": "a" * 200},
    "task": TEXT,
    "base_digest": TEXT,
    "method": TEXT,
    "kind": {**TEXT, "an unknown name": "lora2"},
    "hidden_size": {**NO_NUMBER, "a fraction": 1.5},
    "virtual_tokens": {**NO_NUMBER, "a fraction": 1.5},
    "metrics": {"a text": "good", "a list": [1]},
    "stop": {"a text": "end", "numbers": [1], "too many": ["x"] * 100, "a long text": ["x" * 999]},
    "max_new_tokens": {**NO_NUMBER, "zero": 0, "negative": -1, "2^32": 2**32, "10^400": 10**400},
    "golden": {
        "a text": "a",
        "numbers": [1],
        "no output": [{"inputs": {}}],
        "numbers as inputs": [{"inputs": {"a": 1}, "output": "b"}],
        "a negative token": [{"inputs": {}, "output": "b", "token_ids": [-1]}],
        "too many": [{"inputs": {}, "output": "b"}] * 100,
    },
    "notes": {"a text": "a", "numbers": [1]},
    "created": TEXT,
    "template": {"a number": 5, "a list": []},
    "unheard_of": {"an unknown field": 1},
}


def test_a_bad_field_of_a_card_is_refused_by_name() -> None:
    record = json.loads(Card("tax").to_json())
    check(
        "card",
        bad_values(CARD),
        lambda bad: Card.from_json(json.dumps({**record, bad.field: bad.value})),
    )


TOKENIZER: Mapping[str, Values] = {
    "eos_token_id": {
        "a text": "end",
        "negative": -5,
        "a fraction": 1.5,
        "a list of texts": ["end"],
        "an object": {"a": 1},
        "a boolean": True,
        "over 64 bits": 2**64,
    },
    "bos_token_id": {"a text": "start", "negative": -1, "a fraction": 1.5, "a boolean": True},
}


def test_a_bad_field_of_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(model_type="bpe"))

    def read(bad: BadValue) -> object:
        record = json.dumps({bad.field: bad.value})
        (tmp_path / "generation_config.json").write_text(record)
        return open_tokenizer(tmp_path)

    check("tokenizer", bad_values(TOKENIZER), read)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 50256]}')
    assert open_tokenizer(tmp_path).stop_ids == (2, 50256)  # Never sampled by a small model.


def test_links_that_form_loops_are_not_followed(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"loop{number}").symlink_to(".")
    (tmp_path / "weights").write_bytes(b"")
    assert set(scan_folder_recursive(tmp_path).spans) == {"weights"}
    (tmp_path / "itself").symlink_to("itself")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        scan_folder_recursive(tmp_path)
