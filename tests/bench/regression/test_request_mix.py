"""Request mix: it is equal in every run and contains every kind of request."""

from bench.regression import request_mix
from bench.regression.request_mix import (
    IN_PROCESS,
    INT8,
    REQUESTS,
    SETUPS,
    SEVERAL_SEQUENCES,
    calls_by_setup,
)


def test_calls_are_equal_in_every_run_and_cover_every_kind() -> None:
    calls = calls_by_setup(["a", "b"], SETUPS, REQUESTS - IN_PROCESS)
    assert calls == calls_by_setup(["a", "b"], SETUPS, REQUESTS - IN_PROCESS)
    all_calls = [call for setup_calls in calls.values() for call in setup_calls]
    assert len(all_calls) + IN_PROCESS == 200
    assert {call.kind for call in all_calls} == set(request_mix._KINDS)
    assert INT8 not in SETUPS


def test_pipeline_parallel_setups_get_no_requests_of_several_sequences() -> None:
    calls = calls_by_setup(["a", "b"], SETUPS, REQUESTS - IN_PROCESS)
    pipeline_calls = [call for setup in SETUPS if setup.pp > 1 for call in calls[setup.name]]
    assert pipeline_calls
    assert not {call.kind for call in pipeline_calls} & set(SEVERAL_SEQUENCES)
