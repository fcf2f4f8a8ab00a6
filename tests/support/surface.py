"""Records the user-visible surface: flags, settings, metrics, routes, errors, logs, files.

`python -m tests.support.surface` prints the record, and with `--write` replaces
tests/golden/surface.json. The record contains no name of a module, class or function and no
sentence, so refactoring does not change it.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "surface.json"


def record(folder: Path) -> dict[str, Any]:
    """Record the complete surface; the commands write their files into the empty `folder`."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "COLUMNS": "80"}
    from tests.support import surface_server

    adapters = folder / "adapters"
    for name in ("adapters", "runs", "checkpoints", "plans", "server", "codes"):
        (folder / name).mkdir()
    # The server loads while the other parts are recorded.
    with surface_server.starting(folder / "server" / "0", adapters) as server:
        from tests.support import (
            surface_command,
            surface_files,
            surface_names,
            surface_source,
        )

        reasons = {
            name: {"code": code, "http": status, "retry_s": retry_s}
            for name, code, status, retry_s in surface_names.error_reasons()
        }
        sections: dict[str, Any] = {
            "commands": surface_command.commands(),
            "settings": surface_command.settings_keys(),
            "http_bodies": surface_command.http_bodies(),
            "error_domain": surface_names.ERROR_DOMAIN,
            "error_reasons": reasons,
            "log_events": surface_source.log_events(),
            "environment": surface_source.environment_variables({*reasons, "TP"}),
            "checkpoints": surface_files.checkpoints(folder / "checkpoints"),
            "runs": surface_files.tuning_runs(folder / "runs", adapters),
            "plans": surface_files.plans(folder / "plans"),
            "reports": surface_files.reports(adapters / "whole@1.safetensors"),
        }
        codes = surface_command.exit_codes(surface_files.CHECKPOINT, folder / "codes")
        sections["exit_codes"] = codes
        sections["server"] = surface_server.surface(server, "whole")
    sections["cache"] = surface_files.layout(folder / "cache" / "preamble")
    return sections


def text_of(sections: dict[str, Any]) -> str:
    """Return sorted JSON with one entry per line, so that a difference is readable."""
    plain = json.loads(json.dumps(sections))  # Converts keys to texts, which sort the same always.
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.surface", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"replace {GOLDEN.name}")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        text = text_of(record(Path(folder)))
    if flags.write:
        GOLDEN.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
