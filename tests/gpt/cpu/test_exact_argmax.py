"""The likeliest token by a shortlist is the one that all logits have, to the last tie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.backends.cpu_packing import pack
from gpt.cpu import exact_argmax, packed_linear
from gpt.cpu.exact_argmax import ROWS_MAX, Shortlist
from gpt.cpu.int8_linear import multiplies
from gpt.cpu.packed_linear import Panels
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import Begin, Step, Table
from serving.worker.model_runner import Runner
from tests.support.models import CLASSIC, CONFIGS, build

if not multiplies():
    pytest.skip("this machine does not multiply bytes", allow_module_level=True)


def both(weight: Tensor) -> tuple[Panels, Shortlist | None]:
    memory = torch.empty(packed_linear.size(weight), dtype=torch.bfloat16)
    head = Panels(weight, memory, wide=True)
    return head, Shortlist.of(weight, head)


@given(
    st.integers(0, 1 << 30),
    st.sampled_from([(2, 1), (64, 33), (70, 100), (130, 700), (514, 320)]),
    st.one_of(st.integers(1, 14), st.integers(1, ROWS_MAX)),
    st.sampled_from(["alike", "twice", "one bit", "far apart", "whole numbers", "outliers"]),
    st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_it_is_the_first_of_the_largest_logits(
    seed: int, shape: tuple[int, int], rows: int, kind: str, threads: int
) -> None:
    channels, columns = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(columns, channels, generator=generator)
    x = torch.randn(rows, channels, generator=generator)
    if kind == "alike":
        weight = weight[:1] + weight * 1e-3
    elif kind == "twice":
        weight = weight[torch.randint(max(1, columns // 3), (columns,), generator=generator)]
    elif kind == "far apart":
        order = torch.randperm(columns, generator=generator)
        weight = weight * torch.logspace(6, -12, columns)[order][:, None]
        x = x * torch.logspace(-6, 6, rows)[:, None]
    elif kind == "whole numbers":
        weight, x = weight.round(), x.round()
        x[:, 0] = weight[:, 0] = 1
    elif kind == "outliers":
        x[:, :: channels // 2] *= 1000
        weight[:, :: channels // 2] *= 50
    weight, x = weight.bfloat16(), x.bfloat16()
    if kind == "one bit":
        weight = weight[:1].repeat(columns, 1)
        places = torch.randint(channels, (columns,), generator=generator)
        weight.view(torch.int16)[torch.arange(columns), places] += 1
    head, short = both(weight)
    assert short is not None
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = short.best(x)
    finally:
        torch.set_num_threads(before)
    assert got is not None
    assert torch.equal(got, head(x, None, None, None).argmax(-1))


@pytest.mark.parametrize("rows", [2, 40])
def test_of_many_tokens_few_are_looked_at(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(20_000, 768, generator=generator).bfloat16()
    head, short = both(weight)
    assert short is not None
    for _ in range(5):
        x = torch.randn(rows, 768, generator=generator).bfloat16()
        got = short.best(x)
        assert got is not None
        assert torch.equal(got, head(x, None, None, None).argmax(-1))
    assert short.looked / short.steps / rows < 0.02 * 20_000 / packed_linear.COLUMNS


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, 1e-30, 1e20])
def test_of_rows_that_allow_no_bounds_it_says_nothing(number: float) -> None:
    generator = torch.Generator().manual_seed(1)
    _, short = both(torch.randn(9000, 64, generator=generator).bfloat16())
    assert short is not None
    x = torch.randn(3, 64, generator=generator).bfloat16()
    assert short.best(x) is not None
    x[1] = number
    assert short.best(x) is None
    assert short.best(x[:1]) is not None


@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 1e30])
def test_a_head_that_allows_no_bounds_has_none(number: float) -> None:
    weight = torch.ones(5000, 8).bfloat16()
    weight[4500, 3] = number
    assert both(weight)[1] is None
    assert both(torch.zeros(100, 8).bfloat16())[1] is None


def test_where_it_does_not_help_it_rests_for_longer_each_time() -> None:
    head, short = both(torch.ones(640, 64).bfloat16())
    assert short is not None
    x = torch.ones(1, 64).bfloat16()
    answers = [short.best(x) is not None for _ in range(3 * exact_argmax.PAUSE_MIN + 3)]
    assert [place for place, one in enumerate(answers) if one] == [
        *(0, exact_argmax.PAUSE_MIN + 1, 3 * exact_argmax.PAUSE_MIN + 2)
    ]
    assert head is not None


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_the_same_with_it_and_without(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    pack(model)
    short = model.shortlist
    assert short is not None
    made = {}
    for kept in (short, None):
        model.shortlist = kept
        config = ServerConfig("model", kv_tokens_max=64, running_requests_max=2)
        runner = Runner(model, config, blocks=5, slots=2)
        ids, past, tokens = [5, 6, 7, 8], [0, 0], []
        for number in range(12):
            begins = [Begin(slot, Sampling(), [5, 6], []) for slot in (0, 1)] if not number else []
            tables = [Table(slot, 0, [1 + 2 * slot, 2 + 2 * slot]) for slot in (0, 1)]
            length = len(ids) // 2
            outcome = runner.run(
                Step(
                    number,
                    slots=[0, 1],
                    past=past,
                    lengths=[length] * 2,
                    ids=ids,
                    draws=[True] * 2,
                    scores=[0, 0],
                    begins=begins,
                    tables=tables,
                )
            )
            assert outcome is not None and not outcome.faults
            past, ids = [one + length for one in past], outcome.tokens
            tokens += ids
        made[kept is None] = tokens
    assert made[True] == made[False]
    assert short.steps > 0


def test_who_asks_for_more_than_the_likeliest_has_all_logits() -> None:
    model = build(CLASSIC, dtype=torch.bfloat16)
    pack(model)
    assert model.shortlist is not None
    runner = Runner(
        model, ServerConfig("model", kv_tokens_max=64, running_requests_max=2), blocks=5, slots=2
    )
    for number, rule in enumerate([Sampling(temperature=1.0), Sampling(logprobs=2)]):
        outcome = runner.run(
            Step(
                number,
                slots=[0],
                past=[0],
                lengths=[2],
                ids=[5, 6],
                draws=[True],
                scores=[0],
                begins=[Begin(0, rule, [5, 6], [])],
                tables=[Table(0, 0, [1])],
            )
        )
        assert outcome is not None and len(outcome.tokens) == 1
    assert model.shortlist.steps == 0


def test_a_row_that_is_not_finite_is_still_a_fault() -> None:
    model = build(CLASSIC, dtype=torch.bfloat16)
    pack(model)
    assert model.embedding is not None
    with torch.no_grad():
        model.embedding.rows[9] = float("nan")
    runner = Runner(
        model, ServerConfig("model", kv_tokens_max=64, running_requests_max=2), blocks=5, slots=2
    )
    outcome = runner.run(
        Step(
            1,
            slots=[0, 1],
            past=[0, 0],
            lengths=[1, 1],
            ids=[5, 9],
            draws=[True, True],
            scores=[0, 0],
            begins=[Begin(slot, Sampling(), [5], []) for slot in (0, 1)],
            tables=[Table(slot, 0, [1 + slot]) for slot in (0, 1)],
        )
    )
    assert outcome is not None
    assert outcome.faults == [1]
