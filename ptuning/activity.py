"""Activity of a run: loading, measuring or other work besides training steps, with its progress.

An activity has a name and a number of units, of which some are complete. The modules that do the
work report counts to an `ActivityCallback`; the display on the terminal computes the remaining
time. This module prints nothing.
"""

from collections.abc import Callable

from ptuning.run_facts import ADAPTER, NO_PROMPT, ORACLE

# Called with the name of an activity, and its numbers of complete and of all units. The activity
# has ended when both numbers are equal.
ActivityCallback = Callable[[str, int, int], None]

LOADING = "loading weights, MiB"
# Maps each variant to the activity that generates and scores its answers.
MEASURING = {
    NO_PROMPT: "measuring without the adapter",
    ORACLE: "measuring with the written instruction",
    ADAPTER: "measuring with the adapter",
}


def ignore_activity(activity: str, completed: int, total: int) -> None:
    """Ignore the progress of an activity; the callback of ranks without a display."""


def loading_progress(report_activity: ActivityCallback) -> Callable[[int, int], None]:
    """Return the progress callback of `gpt.model.loading.load_model`, which counts bytes.

    The activity counts mebibytes.
    """

    def report_bytes(loaded: int, total: int) -> None:
        total_mib = -(-total // 2**20)
        # Rounding must not end the activity before all bytes are loaded.
        loaded_mib = total_mib if loaded == total else min(loaded >> 20, total_mib - 1)
        report_activity(LOADING, loaded_mib, total_mib)

    return report_bytes
