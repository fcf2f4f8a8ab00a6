"""Speed measurements: the selection of groups, and the figure of a tuning run."""

from bench.regression.speed_measurements import GROUPS, select_groups, tokens_per_s


def test_measurement_groups_are_selected_by_suite_and_part() -> None:
    assert len(select_groups(None, ())) == len(GROUPS)
    groups = select_groups("peers", ("gpt2", "llama"))
    assert [group.part for group in groups] == ["gpt2", "llama"]
    names = [row.name for group in GROUPS for row in group.rows]
    assert len(names) == len(set(names))


def test_tuning_speed_excludes_the_first_two_steps() -> None:
    rows = ["step,text_tokens,seconds", "1,9,9", "2,9,9", "3,100,0.5", "4,300,1.5"]
    assert tokens_per_s("\n".join(rows)) == 200.0
