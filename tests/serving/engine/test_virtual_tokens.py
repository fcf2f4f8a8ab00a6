"""Leading virtual tokens at every boundary case: output equals that of one forward pass.

Cases: chunks that end before, at and after the last virtual token, cache matches that end among
them, preemption, empty text, one row, and the maximum number of rows. The reference is the
generation loop with the complete table. Replacement of an adapter in use is tested in
tests/serving/protocols/preamble/test_adapters.py and test_many_tasks.py.
"""

from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from serving.messages import AdapterRef, Submission
from tests.support.engine_scenarios import Scenario, ScenarioRun, lead
from tests.support.models import CONFIGS, build

V = 5  # Virtual tokens of the equally long adapters.
CONTEXT = CONFIGS["odd"].max_position_embeddings
ROWS_MAX = CONTEXT // 2  # The server's default limit.
TEXT = [7, 3, 60, 3, 21, 90, 8]
WHEN_IDLE = 1000  # An arrival after more updates than the submissions before need.
SAMPLING = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def model() -> GPT:
    """Models with learned and with rotary positions: both reveal wrong positions."""
    return build(CONFIGS["odd"])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    """Two adapters of equal length, one of one row, and one of the maximum number of rows."""
    folder = tmp_path_factory.mktemp("adapters")
    references = []
    for index, count in enumerate([V, V, 1, ROWS_MAX]):
        generator = torch.Generator().manual_seed(index)
        table = torch.randn(count, CONFIGS["odd"].hidden_size, generator=generator)
        adapter = build_adapter(Card(f"adapter-{index}"), table)
        path = folder / f"{adapter.card.name}.safetensors"
        save_adapter(adapter, path)
        references.append(AdapterRef(adapter.digest, count, str(path)))
    return references


def submission_of(
    model: GPT,
    number: int,
    rows: AdapterRef,
    text: list[int],
    *,
    first: int | None = None,
    priority: int = 0,
) -> Submission:
    """A prompt of the adapter's rows (or the first of them) and a text."""
    virtual = range(rows.row_count if first is None else first)
    prompt = [model.config.vocab_size + row for row in virtual] + text
    return Submission(number, prompt, SAMPLING, adapter_ref=rows, priority=priority)


def run_and_check(
    model: GPT, submissions: list[tuple[int, Submission]], **limits: int
) -> ScenarioRun:
    """Run prompts on the engine and compare every answer with the generation loop."""
    settings = {"kv_block_tokens": 4, "running_requests_max": 4, "kv_tokens_max": 400, "pp": 1}
    scenario_run = lead(model, Scenario("", "float64", settings | limits, submissions))
    for _, submission in submissions:
        assert submission.adapter_ref is not None
        table = open_adapter(Path(submission.adapter_ref.file)).table
        (expected,) = generate(model, [submission.prompt], submission.sampling, adapter_table=table)
        assert scenario_run.answers[submission.sequence_id].tokens == expected.token_ids
        assert len(expected.token_ids) == SAMPLING.max_new_tokens
    return scenario_run


@pytest.mark.parametrize("chunk", [1, V - 1, V, V + 1])
def test_a_chunk_may_end_before_at_or_after_the_last_virtual_token(
    model: GPT, adapters: list[AdapterRef], chunk: int
) -> None:
    limits = {"kv_block_tokens": 1, "running_requests_max": 1, "step_tokens_max": chunk}
    scenario_run = run_and_check(model, [(0, submission_of(model, 0, adapters[0], TEXT))], **limits)
    assert scenario_run.largest == chunk


@pytest.mark.parametrize("matched", [1, 3, 4])
def test_a_cache_match_may_end_among_the_virtual_tokens(
    model: GPT, adapters: list[AdapterRef], matched: int
) -> None:
    first = submission_of(model, 0, adapters[0], [50] * 6, first=matched)
    submissions = [(0, first), (40, submission_of(model, 1, adapters[0], TEXT))]
    assert run_and_check(model, submissions, kv_block_tokens=matched).answers[1].cached == matched


def test_virtual_tokens_survive_preemption(model: GPT, adapters: list[AdapterRef]) -> None:
    # Each adapter is read into the cache before the others arrive. Otherwise the time of a read,
    # by a thread, decides how many sequences run at once.
    submissions = [
        (0, submission_of(model, 5 + number, adapters[number], TEXT)) for number in range(2)
    ]
    submissions += [
        (WHEN_IDLE, submission_of(model, number, adapters[number % 2], [*TEXT, number]))
        for number in range(4)
    ]
    urgent = submission_of(model, 4, adapters[0], TEXT, priority=2)
    submissions.append((WHEN_IDLE + 4, urgent))
    scenario_run = run_and_check(model, submissions, kv_tokens_max=CONTEXT, prefix_cache=False)
    assert scenario_run.load.preemptions > 0


def test_the_text_after_virtual_tokens_may_be_empty(model: GPT, adapters: list[AdapterRef]) -> None:
    run_and_check(
        model, [(0, submission_of(model, number, rows, [])) for number, rows in enumerate(adapters)]
    )


def test_the_smallest_and_the_largest_adapter_are_served(
    model: GPT, adapters: list[AdapterRef]
) -> None:
    submissions = [
        (0, submission_of(model, number, adapters[2 + number], TEXT)) for number in range(2)
    ]
    run_and_check(model, [*submissions, (30, submission_of(model, 2, adapters[3], [*TEXT, 1]))])
    run_and_check(
        model, [(0, submission_of(model, 0, adapters[3], [5] * (CONTEXT - ROWS_MAX - 6)))]
    )


def test_equally_long_adapters_share_no_blocks(model: GPT, adapters: list[AdapterRef]) -> None:
    submissions = [
        (40 * number, submission_of(model, number, adapters[number % 2], TEXT))
        for number in range(4)
    ]
    scenario_run = run_and_check(model, submissions)
    answers = [scenario_run.answers[number] for number in range(4)]
    assert answers[0].tokens != answers[1].tokens
    assert [answer.cached > 0 for answer in answers] == [False, False, True, True]
