"""The command and settings of deploy/kubernetes/trainjob.yaml, with the variables of the Trainer.

Two agents of torchrun on loopback represent the nodes. Kubeflow Trainer sets the variables `PET_*`;
torchrun reads them in place of flags.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from examples.demo.tasks import Split, plain_records
from tests.support.manifests import manifest
from tests.support.servers import ROOT, free_port

RUN_S = 240.0
STEPS = 2
RECORDS = 32


@pytest.mark.slow
def test_a_train_job_tunes_an_adapter_on_all_its_nodes(tmp_path: Path) -> None:
    trainer = manifest("TrainJob", "mood")["spec"]["trainer"]
    runtime = manifest("ClusterTrainingRuntime", "preamble-tune")["spec"]
    (job,) = runtime["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    text = manifest("ConfigMap", "preamble-tune-mood")["data"]["task.yaml"]
    for folder in ("tuning", "adapters"):
        text = text.replace(f"/{folder}", str(tmp_path / folder))
        (tmp_path / folder).mkdir()
    settings = {**yaml.safe_load(text), "model": "examples/demo/checkpoint", "device": "cpu"}
    file = tmp_path / "task.yaml"
    file.write_text(yaml.safe_dump({**settings, "steps": STEPS}))
    splits: dict[str, Split] = {"data": "train", "validation": "held-out"}
    for key, split in splits.items():
        records = plain_records("mood", RECORDS, 0, split)
        Path(settings[key]).write_text(
            "".join(f"{json.dumps(vars(record))}\n" for record in records)
        )

    torchrun, *words = container["command"]
    assert torchrun == "torchrun"
    words = [str(file) if word == "/config/task.yaml" else word for word in words]
    port = free_port()
    with ExitStack() as resources:
        agents = []
        for node in range(trainer["numNodes"]):
            variables = {
                "PET_NNODES": trainer["numNodes"],
                "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
                "PET_NODE_RANK": node,
                "PET_MASTER_ADDR": "127.0.0.1",
                "PET_MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
            }
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            log = resources.enter_context((tmp_path / f"node{node}.log").open("w"))
            agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )
            resources.callback(agent.wait)
            resources.callback(agent.kill)
            agents.append(agent)
        codes = [agent.wait(RUN_S) for agent in agents]
    logs = [(tmp_path / f"node{node}.log").read_text() for node in range(len(agents))]
    assert codes == [0, 0], "\n".join(logs)
    assert f"step {STEPS}/{STEPS}" in logs[0]
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["mood@1.safetensors"]
