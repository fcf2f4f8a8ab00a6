"""Device waits of a step without a CUDA graph, counted on a fake device: one at the most."""

from importlib.util import find_spec

import msgspec
import pytest
import torch

from gpt.sampling_params import SamplingParams
from serving.messages import BlockTableUpdate, SlotInit, Step
from tests.support.graph_steps import PROMPT, RULES, prefill_step

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools"),
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="the fake device needs a CPU build of torch"
    ),
]

BANS = SamplingParams(
    temperature=2.0,
    seed=3,
    min_p=0.1,
    typical_p=0.9,
    no_repeat_ngram_size=2,
    bad_words=((PROMPT[0],),),
    logit_bias=((5, 1.5),),
    length_decay=(0, 1.1),
    stop_token_ids=(4,),
)
# Greedy, sampled with top-p, with log-probabilities, with penalties, with bans.
SLOT_RULES = [*RULES[:4], BANS]
NEW_SLOT = len(SLOT_RULES)
LONG_PROMPT = (PROMPT * 6)[:50]


def mixed_step(prefill: Step) -> Step:
    """All slots decode beside the first chunk of a new prompt, from which no token is sampled."""
    count, chunk = len(prefill.slots), LONG_PROMPT[:30]
    return Step(
        2,
        slots=[*prefill.slots, NEW_SLOT],
        past=[*prefill.lengths, 0],
        lengths=[*[1] * count, len(chunk)],
        token_ids=[*[-1] * count, *chunk],  # -1: the last sampled token, which is on the device.
        draws=[*[True] * count, False],
        prompt_score_counts=[0] * (count + 1),
        slot_inits=[SlotInit(NEW_SLOT, SLOT_RULES[3], LONG_PROMPT, [])],
        block_table_updates=[BlockTableUpdate(NEW_SLOT, 0, [60, 61, 62, 63])],
        block_copies=[(1, 59)],
        block_clears=[60],
    )


def chunk_step(end: int) -> Step:
    """The chunk of the new prompt that ends at `end`; a token is sampled after its last token."""
    return Step(
        3,
        slots=[NEW_SLOT],
        past=[end - 10],
        lengths=[10],
        token_ids=LONG_PROMPT[end - 10 : end],
        draws=[end == len(LONG_PROMPT)],
        prompt_score_counts=[0],
    )


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize("family", ["classic", "llama", "experts"])
def test_an_eager_step_waits_once(family: str, fp8_kv: bool) -> None:
    from tests.support.fake_device import fake_device
    from tests.support.fake_device_runners import FAMILIES, make_runner

    with fake_device() as device:
        runner = make_runner(FAMILIES[family], torch.bfloat16, fp8_kv=fp8_kv)
        prefill = prefill_step(SLOT_RULES, blocks=4)
        decode = msgspec.structs.replace(
            mixed_step(prefill), slot_inits=[], block_table_updates=[], block_clears=[]
        )
        # With the maximum number of copies to the device: two for the inputs of the step and of the
        # attention, the others for sampling rules. A copy that does not wait takes the host's time.
        for step, copies_max in (
            (prefill, 25),
            (mixed_step(prefill), 24),
            (chunk_step(40), 2),
            (chunk_step(50), 12),
            (decode, 23),
        ):
            with device.counted() as counts:
                outcome = runner.run_step(step)
            assert outcome is not None
            assert len(outcome.tokens) == sum(step.draws) and outcome.faults == []
            assert len(counts.waits) == 1, counts.waits
            assert counts.blocking_copies == []
            assert len(counts.copies) <= copies_max, counts.copies
