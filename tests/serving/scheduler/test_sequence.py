"""Sequence: state changes while it waits, runs, is preempted and ends."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import serving.scheduler
from gpt.sampling_params import SamplingParams
from serving.messages import Submission
from serving.scheduler.sequence import Sequence
from tests.support.fake_ranks import VOCAB_SIZE, make_adapter_ref, text_ids, virtual_ids

BLOCK_TOKENS = 4


def new_sequence(prompt: list[int], max_new_tokens: int = 8, **options: object) -> Sequence:
    submission = Submission(
        7,
        prompt,
        SamplingParams(max_new_tokens=max_new_tokens),
        **options,  # type: ignore[arg-type]
    )
    return Sequence.from_submission(
        submission, arrival_order=0, vocab_size=VOCAB_SIZE, block_tokens=BLOCK_TOKENS, now=1.0
    )


def test_a_preempted_sequence_keeps_its_tokens_and_loses_its_kv() -> None:
    sequence = new_sequence(text_ids(5))
    sequence.start_running(slot=3, block_tables=[[1, 2]], matched_tokens=0, now=2.0)
    sequence.plan_tokens(5, 2.0)
    sequence.complete_step()
    assert sequence.advance(5, [9]) == [9]
    assert (sequence.computed_tokens, sequence.planned_tokens) == (5, 5)
    sequence.check()
    sequence.stop_running()
    sequence.enqueue(3.0)
    assert sequence.is_waiting
    assert sequence.tokens == [*text_ids(5), 9]
    assert (sequence.computed_tokens, sequence.block_tables, sequence.kv_capacity) == (0, [], 0)
    sequence.start_running(slot=0, block_tables=[[4, 5]], matched_tokens=4, now=6.0)
    # Waits of one and of three seconds; the generated token belongs to the prefill now.
    assert sequence.waited_s == 4.0
    assert sequence.unplanned_prefill_tokens == 2


def test_rejected_drafts_are_planned_again() -> None:
    sequence = new_sequence(text_ids(3))
    sequence.start_running(slot=0, block_tables=[[1, 2, 3]], matched_tokens=3, now=1.0)
    sequence.plan_tokens(1, 1.0)
    sequence.plan_drafts([5, 6, 7])
    assert sequence.planned_tokens == 7
    sequence.complete_step()
    assert sequence.advance(4, [5, 8, 9, 9]) == [5, 8]
    assert sequence.computed_tokens == sequence.planned_tokens == 5


def test_the_first_end_reason_is_reported() -> None:
    sequence = new_sequence(text_ids(3))
    sequence.end("fault", "not finite")
    sequence.end("cancelled")
    output = sequence.final_output()
    assert (output.end, output.reason) == ("fault", "not finite")


def test_only_the_first_output_has_the_phases() -> None:
    sequence = new_sequence(text_ids(3))
    sequence.start_running(slot=0, block_tables=[[1]], matched_tokens=0, now=1.5)
    first = sequence.step_output([4], [], [], now=2.5)
    assert first.phases is not None
    assert (first.phases.queue_s, first.phases.prefill_s) == (0.5, 1.0)
    assert sequence.step_output([4], [], [], now=3.0).phases is None


def test_the_virtual_range_covers_all_virtual_tokens() -> None:
    sequence = new_sequence(
        [*text_ids(2), *virtual_ids(1), *text_ids(3), VOCAB_SIZE + 1, 4],
        adapter_ref=make_adapter_ref("task", 2),
    )
    assert (sequence.virtual_start, sequence.virtual_end) == (2, 7)
    plain = new_sequence(text_ids(3))
    assert (plain.virtual_start, plain.virtual_end) == (0, 0)


# ------------------------------------------------------------------------- ownership of the state

SEQUENCE_FIELDS = {field.name for field in fields(Sequence)}


def foreign_assignments(module: str) -> Iterator[str]:
    """Assignments to an attribute of a sequence, or reads of a private one, from outside."""
    for node in ast.walk(ast.parse(module)):
        if not isinstance(node, ast.Attribute):
            continue
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_assigned = isinstance(node.ctx, ast.Store | ast.Del) and node.attr in SEQUENCE_FIELDS
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        if not is_own and (is_assigned or is_private):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_other_modules_change_a_sequence_only_through_its_methods() -> None:
    (package,) = serving.scheduler.__path__
    modules = sorted(Path(package).glob("*.py"))
    assert len(modules) > 10
    breaches = [
        f"{module.name}, {breach}"
        for module in modules
        for breach in foreign_assignments(module.read_text("utf-8"))
    ]
    assert not breaches, "\n".join(breaches)


def test_the_ownership_rule_detects_an_assignment_from_outside() -> None:
    assert list(foreign_assignments("sequence.planned_tokens += 1"))
    assert list(foreign_assignments("allocator._running.clear()"))
    assert not list(foreign_assignments("self.planned_tokens = sequence.planned_tokens"))
