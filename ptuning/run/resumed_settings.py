"""Settings of a resumed run: keys that the settings file does not set keep the run's first values.

A release of Preamble may change defaults and add settings. An unfinished run of an earlier release
must resume to the same losses, so its saved settings replace the defaults of this release. A key
that the file sets to another value than the run has is not replaced; the training state refuses it.
A sweep that began in version 0.1 uses the defaults of that version for all of its runs.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gpt.settings import setting_fields, short_repr
from ptuning.config import TuneConfig, rename_monitor
from ptuning.run.training_loop import run_folder
from ptuning.run.training_state import RESUMABLE_CHANGES, read_settings, unfinished_state
from ptuning.task import Task


def resumed_settings(config: TuneConfig, file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved settings that replace defaults; empty if no unfinished run differs.

    `config` was read from the mapping `file`.
    """
    file = rename_monitor(file)
    state = unfinished_state(run_folder(config.output_config, config.data_config))
    if state is None:
        return {}
    saved = read_settings(state.facts.get("origin", {}))
    current = json.loads(json.dumps(config.to_record()))  # As JSON stores the saved settings.
    settings = {
        key: saved[key]
        for key in setting_fields(TuneConfig).keys() & saved.keys()
        if key not in {*file, *RESUMABLE_CHANGES, "tasks"} and saved[key] != current[key]
    }
    tasks = config.data_config.tasks
    saved_tasks, file_tasks = saved.get("tasks") or [], file.get("tasks") or []
    if tasks and len(tasks) == len(saved_tasks) == len(file_tasks):
        resumed_tasks = tuple(map(_resumed_task, tasks, saved_tasks, file_tasks))
        if resumed_tasks != tasks:
            settings["tasks"] = resumed_tasks
    return settings


def _resumed_task(task: Task, saved: Mapping[str, Any], file: Mapping[str, Any]) -> Task:
    """Return `task` with the saved settings that its mapping in the file does not set."""
    unset = {field.name for field in fields(Task)} & saved.keys() - file.keys()
    settings: dict[str, Any] = {
        key: tuple(saved[key]) if isinstance(saved[key], list) else saved[key] for key in unset
    }
    return replace(task, **settings)


def defaults_of_version_0_1(config: TuneConfig, file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of version 0.1 that have changed, for keys that `file` does not set.

    Return none if the file sets `measure`, which version 0.1 did not have. `config` was read from
    the mapping `file`.
    """
    file = rename_monitor(file)
    if "measure" in file:
        return {}
    defaults: dict[str, Any] = {"measure": "first", "validation_examples": 200}
    # `patience` has an effect only with validations during the run.
    if config.validation_config.validate_every:
        defaults["patience"] = 0
    elif "patience" not in file:
        defaults["validate_every"] = 0
    return {key: value for key, value in defaults.items() if key not in file}


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Return the line that names the settings with which a run resumes."""
    values = ", ".join(f"{key}: {short_repr(value)}" for key, value in sorted(settings.items()))
    return f"the unfinished run keeps settings that the file does not set: {values}"
