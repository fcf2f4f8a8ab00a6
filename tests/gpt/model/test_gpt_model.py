"""The GPT model: parameters, KV cache, virtual tokens, dropout and configuration checks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.dropout import Dropout
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.parallel.weight_sharding import parameter_specs
from gpt.sampling_params import SamplingParams
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, build, recompute_greedy


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_has_exactly_the_parameters_of_the_table(name: str) -> None:
    model = GPT(CONFIGS[name], device="meta")
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    assert shapes == {p.name: p.shape for p in parameter_specs(CONFIGS[name]).values()}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_test_models_have_a_standard_deviation_of_5(name: str) -> None:
    ids = torch.arange(24).view(2, 12)
    assert build(CONFIGS[name]).logits(ids).std() >= 5


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_through_the_cache_equal_full_recomputation(name: str) -> None:
    model = build(CONFIGS[name])
    prompts = [[5, 6, 7], [1], list(range(30, 50))]
    completions = generate(model, prompts, SamplingParams(max_new_tokens=16))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == recompute_greedy(model, prompt, 16).tokens


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=20), min_size=1, max_size=4),
    st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_chunked_prefill_gives_the_logits_of_the_full_prompt(
    name: str, prompts: list[list[int]], chunks: list[int]
) -> None:
    config = CONFIGS[name]
    model = build(config)
    pool = KVPool(config, model.layers, 2 * len(prompts), dtype=torch.float64)
    tables = torch.arange(2 * len(prompts)).view(-1, 2)
    past = [0] * len(prompts)
    for size in chunks * 20:
        rows = [row for row, prompt in enumerate(prompts) if past[row] < len(prompt)]
        if not rows:
            break
        pieces = [prompts[row][past[row] : past[row] + size] for row in rows]
        lengths = [len(piece) for piece in pieces]
        row_past = [past[row] for row in rows]
        batch = Batch.paged(lengths, row_past, tables[rows], pool.block_tokens)
        with torch.inference_mode():
            logits = model(torch.tensor([t for piece in pieces for t in piece]), batch, pool)
        for row, chunk_logits, length in zip(rows, logits.split(lengths), lengths, strict=True):
            past[row] += length
            want = model.logits(torch.tensor([prompts[row][: past[row]]]))[0, -length:]
            assert (chunk_logits - want).abs().max() <= 1e-10


def test_virtual_tokens_with_token_embeddings_equal_the_tokens() -> None:
    for config in CONFIGS.values():
        model = build(config)
        assert model.embedding is not None
        text = [9, 8, 7, 6, 5]
        table = model.embedding.weight_shard[torch.tensor([8, 6])]
        if config.embedding_multiplier_scope == "token_ids":
            # The factor of token embeddings does not apply to virtual tokens.
            table = table * config.embedding_multiplier
        assert torch.equal(model.embedding.embed_tokens(torch.tensor([8, 6])), table)
        virtual = [9, config.vocab_size, 7, config.vocab_size + 1, 5]
        assert torch.equal(
            model.logits(torch.tensor([text])), model.logits(torch.tensor([virtual]), table)
        )


def test_mixed_adapters_in_a_batch_equal_each_alone() -> None:
    model = build(MODERN)
    table = torch.randn(6, MODERN.hidden_size, dtype=torch.float64)
    v = MODERN.vocab_size
    prompts = [[v, v + 1, 5, 6], [5, 6], [v + 2, 5, v + 3, v + 4], [v + 5, 5, 6]]
    together = generate(model, prompts, SamplingParams(max_new_tokens=8), adapter_table=table)
    for prompt, completion in zip(prompts, together, strict=True):
        alone = generate(model, [prompt], SamplingParams(max_new_tokens=8), adapter_table=table)[0]
        assert completion.token_ids == alone.token_ids
        assert completion.token_ids == recompute_greedy(model, prompt, 8, table).tokens


def test_dropout_keeps_the_mean_and_differs_by_seed_and_site_only() -> None:
    like = torch.zeros(1)
    keep = Dropout(1).keep_mask((200, 200), 0.1, (0, 1), like)
    assert abs(keep.float().mean().item() - 0.9) < 0.01
    assert torch.equal(keep, Dropout(1).keep_mask((200, 200), 0.1, (0, 1), like))
    assert not torch.equal(keep, Dropout(2).keep_mask((200, 200), 0.1, (0, 1), like))
    assert not torch.equal(keep, Dropout(1).keep_mask((200, 200), 0.1, (1, 0), like))


def test_bf16_logits_are_close_to_fp64() -> None:
    ids = torch.arange(24).view(2, 12)
    for config in (CLASSIC, MODERN, EXPERTS):
        exact = build(config).logits(ids)
        bf16_logits = build(config, dtype=torch.bfloat16).logits(ids)
        assert bf16_logits.dtype == torch.float32
        # bf16 has 8 bits: an error of a tenth of the standard deviation would show a wrong formula.
        assert (bf16_logits - exact).std() < 0.1 * exact.std()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be a whole number of at least 1"),
        ({"num_layers": 10**400}, "num_layers is a huge number; it must be a whole number"),
        ({"num_layers": 10**9}, "num_layers is 1000000000; it must be at most 65535"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": -4}, "hidden_size is -4; it must be a whole number of at least 0"),
        ({"qkv_bias": "x"}, "qkv_bias is 'x'; it must be true or false"),
        ({"rotary_base": float("nan")}, "rotary_base is nan; it must be a number"),
        ({"rotary_base": -1}, "rotary_base is -1; it must be at least 1"),
        ({"rotary_base": 0}, "rotary_base is 0; it must be at least 1"),
        ({"layernorm_epsilon": 1.0}, "layernorm_epsilon is 1.0; it must be below 1"),
        (
            {"hidden_size": 50, "kv_channels": 0},
            "hidden_size is 50, which the 4 attention heads do not divide",
        ),
        ({"window_size": -1}, "window_size is -1; it must be at least 1 token"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0; .* at least 1"),
        ({"layernorm_epsilon": []}, r"layernorm_epsilon is \[\]; it must be a number"),
        ({"layernorm_epsilon": 0.0}, "layernorm_epsilon is 0.0; it must be above 0"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout is 1.0; it must be in \[0, 1\)"),
        ({"num_experts": -1}, "num_experts is -1"),
        ({"moe_layers": None}, "moe_layers is None; it must be a list of true and false"),
        ({"moe_layers": [1, 0, 1, 0, 1]}, "moe_layers is .*; it must be a list of true and false"),
        ({"normalization": 3}, "normalization is 3; it must be a text"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be a mapping or null"),
        ({"rope_scaling": {"kind": "dynamic", "factor": 2.0}}, "rope_scaling.kind is 'dynamic'"),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 2.0}, "rotary_base": 1.0},
            "rotary_base is 1; YaRN needs a base above 1",
        ),
        ({"window_layers": [True, False]}, "window_layers has 2 entries"),
        ({"window_layers": [True] * 5}, "window_layers is set without window_size"),
        ({"rope_layers": [True]}, "rope_layers has 1 entries"),
        ({"window_rope": {"base": 0.5}}, "rotary_base is 0.5"),
        ({"norm_placement": "sandwich"}, "norm_placement is 'sandwich'"),
        ({"softmax_scale": -1.0}, "softmax_scale is -1.0"),
        ({"residual_multiplier": 0.0}, "residual_multiplier is 0.0; it must be above 0"),
        ({"logits_scaling": -8.0}, "logits_scaling is -8.0; it must be above 0"),
        ({"embedding_multiplier_scope": "rows"}, "scope is 'rows'; choose one of: token_ids, all"),
        ({"query_scaling_beta": -0.1}, "query_scaling_beta is -0.1; it must be at least 0"),
        ({"query_scaling_beta": 0.1}, "query_scaling_length is 0; with query_scaling_beta, it"),
        ({"activation": "xielu", "gated": True}, "activation is 'xielu'; it needs an MLP without"),
        ({"activation": "xielu", "num_experts": 2}, "activation is 'xielu'; it needs an MLP"),
        ({"rope_scaling": {"kind": "linear", "factor": 0}}, "rope_scaling has factor 0"),
        ({"rope_scaling": {"kind": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"kind": "linear"}}, "rope_scaling: .*factor"),
        (
            {"activation": "tanh"},
            "activation is 'tanh'; choose one of: gelu, gelu_tanh, quick_gelu, silu, relu, relu2",
        ),
        ({"num_query_groups": 3}, "4 attention heads do not divide into 3 query groups"),
        ({"rotary_percent": 1.5}, r"rotary_percent is 1.5; it must be in \(0, 1\]"),
        ({"window_size": 0}, "window_size is 0"),
        (
            {"num_experts": 2, "moe_layers": [True]},
            "moe_layers has 1 entries; .* one for each of the 5 layers",
        ),
        ({"moe_layers": (True,) * 5}, "moe_router_topk is 2, and num_experts is 0"),
        ({"nun_layers": 3}, "unknown key 'nun_layers'"),
    ],
)
def test_an_invalid_config_is_refused_by_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig.from_dict(CLASSIC.to_dict() | change)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_round_trips_through_a_dictionary(name: str) -> None:
    assert GPTConfig.from_dict(CONFIGS[name].to_dict()) == CONFIGS[name]
