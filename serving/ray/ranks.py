"""Ranks of a replica on the nodes of its placement group.

The replica's actor is in the first bundle of the group, and starts the first ranks itself, as
`preamble serve` does. In each further bundle an actor (`RankHost`) starts the next ranks; they end
with it. A lost actor is a lost rank: all ranks are stopped and started again. A lost node is a
permanent failure: Serve then starts another replica, where there is space for it. The ranks find
each other by a store of torch. Its server is in the replica's process, on a port that the kernel
chose, and its address is in the data that each rank starts with.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group_table,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gpt.child_processes import ChildProcess, child_environment
from gpt.errors import first_line
from serving.config import ServerConfig
from serving.ranks.message_socket import Channel
from serving.ranks.rank_position import RankPosition, WorkerSpec
from serving.ranks.supervisor import KILL_TIMEOUT_S, LocalSupervisor, describe_exit_code, start_rank
from serving.ranks.watchdog import RankSet, close_descriptors
from serving.ray.placement import divide_ranks
from serving.request import UnavailableError

log = logging.getLogger(__name__)

START_POLL_S = 0.5


class RankHost:
    """The actor of a bundle: starts its ranks, and waits for their exit."""

    def __init__(self) -> None:
        self._processes: dict[int, ChildProcess] = {}

    def start(self, specs: Sequence[bytes], environment: Mapping[str, str]) -> None:
        """Start the ranks of these `WorkerSpec`s. `environment` is added to the actor's own."""
        for frame in specs:
            spec = msgspec.json.decode(frame, type=WorkerSpec)
            # The rank asks the kernel to kill it when this process ends.
            spec = msgspec.structs.replace(spec, parent_pid=os.getpid())
            variables = {**child_environment(os.environ), **environment}
            self._processes[spec.position.rank] = start_rank(spec, variables)

    def wait(self, rank: int) -> int:
        """Wait until a rank has exited, and return its exit code."""
        return self._processes[rank].wait()

    def stop(self) -> None:
        """Kill the ranks."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(KILL_TIMEOUT_S)
        self._processes = {}


class RemoteRank:
    """A rank of another node: a descriptor that is readable after its exit, as a pidfd is."""

    def __init__(self, exit_code: "Future[int]") -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._exit_code = exit_code
        # The watchdog closes `descriptor`, perhaps before the rank has exited.
        self._own_descriptor = os.dup(self.descriptor)
        exit_code.add_done_callback(self._on_exit)

    def _on_exit(self, exit_code: "Future[int]") -> None:
        os.eventfd_write(self._own_descriptor, 1)
        os.close(self._own_descriptor)

    def describe_exit(self) -> str | None:
        if not self._exit_code.done():
            return None
        error = self._exit_code.exception()
        if error is None:
            return describe_exit_code(self._exit_code.result())
        return f"was lost with its actor ({first_line(error)})"


class NodeLostError(Exception):
    """An actor cannot start in its bundle."""


class RaySupervisor(LocalSupervisor):
    """Starts the ranks of a replica in the bundles of its placement group."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        group = get_current_placement_group()
        assert group is not None, "a replica has a placement group"
        self._group: PlacementGroup = group
        self._host: str = ray.util.get_node_ip_address()
        self._store: Any = None
        self._actors: dict[int, Any] = {}  # By the index of their bundle.
        self._remote_ranks: dict[int, RemoteRank] = {}

    def _start_ranks(self) -> RankSet | None:
        assert self._receiver is not None
        try:
            return super()._start_ranks()
        except (NodeLostError, ray.exceptions.RayError) as error:
            if not self._is_closing:
                log.error("event=node_lost reason=%r", str(error))
                # Another replica may run at the address that the client calls.
                self.refusal = UnavailableError(
                    f"a node of this replica was lost ({first_line(error)}); try again in a moment",
                    "ENGINE_LOST",
                )
                self._receiver.ranks_lost(str(self.refusal))
            return None

    def _start_processes(self) -> RankSet:
        import torch.distributed as dist

        bundles = self._group.bundle_specs
        world_size = self._config.parallel_config.ranks
        ranks_by_bundle = divide_ranks(world_size, len(bundles))
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, 0, is_master=True, wait_for_workers=False
        )
        own_channel, peer_socket = Channel.pair()
        descriptors: dict[int, int] = {}
        try:
            with peer_socket:
                specs = [
                    WorkerSpec(
                        RankPosition(rank, world_size, local_rank, len(ranks)),
                        os.getpid(),
                        self._config.to_dict(),
                        store_port=self._store.port,
                        host=self._host,
                        frontend_fd=peer_socket.fileno() if rank == 0 else None,
                    )
                    for ranks in ranks_by_bundle
                    for local_rank, rank in enumerate(ranks)
                ]
                environments = [
                    _rank_environment(bundle, len(ranks), self._config)
                    for bundle, ranks in zip(bundles, ranks_by_bundle, strict=True)
                ]
                hosted_specs = [[specs[rank] for rank in ranks] for ranks in ranks_by_bundle[1:]]
                # All ranks import torch at the same time, which takes seconds.
                started = self._start_remote_ranks(hosted_specs, environments[1:])
                variables = {**child_environment(os.environ), **environments[0]}
                for rank in ranks_by_bundle[0]:
                    self._processes.append(start_rank(specs[rank], variables))
                self._wait_for_actors(started)
                self._watch_remote_ranks(hosted_specs)
            for rank, pid in enumerate(self.pids):
                descriptors[rank] = os.pidfd_open(pid)
            for rank, remote_rank in self._remote_ranks.items():
                descriptors[rank] = remote_rank.descriptor
        except BaseException:
            own_channel.close()
            self._kill_processes()
            close_descriptors(descriptors)
            raise
        parallel = self._config.parallel_config
        sizes = (parallel.tp, parallel.pp, parallel.ep)
        pids = ",".join(map(str, self.pids))
        log.info(
            "event=ranks_started pids=%s bundles=%d tp=%d pp=%d ep=%d", pids, len(bundles), *sizes
        )
        return RankSet(own_channel, descriptors, self._describe_exit)

    def _start_remote_ranks(
        self, specs: Sequence[Sequence[WorkerSpec]], environments: Sequence[Mapping[str, str]]
    ) -> list[Any]:
        """Start an actor and its ranks in each further bundle; return their results to come."""
        started = []
        for index, host_specs in enumerate(specs, 1):
            if index not in self._actors:
                self._actors[index] = self._create_actor(index, len(host_specs))
            frames = [msgspec.json.encode(spec) for spec in host_specs]
            environment = dict(environments[index - 1])
            started.append(self._actors[index].start.remote(frames, environment))
        return started

    def _watch_remote_ranks(self, specs: Sequence[Sequence[WorkerSpec]]) -> None:
        for index, host_specs in enumerate(specs, 1):
            for spec in host_specs:
                rank = spec.position.rank
                exit_code = self._actors[index].wait.remote(rank).future()
                self._remote_ranks[rank] = RemoteRank(exit_code)

    def _create_actor(self, index: int, ranks: int) -> Any:
        """Create the actor of a bundle, which has all its resources."""
        bundle = self._group.bundle_specs[index]
        return (
            ray.remote(RankHost)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources={
                    name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")
                },
                max_concurrency=ranks + 1,  # Each wait for an exit takes a thread.
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            )
            .remote()
        )

    def _wait_for_actors(self, started: Sequence[Any]) -> None:
        """Wait until the actors have started their ranks; raise if one of them cannot."""
        pending, deadline = list(started), time.monotonic() + self._config.parallel_config.load_s
        while pending:
            if time.monotonic() > deadline:
                raise NodeLostError(f"{len(pending)} actors have not started within load_s")
            ended, pending = ray.wait(pending, timeout=START_POLL_S)
            ray.get(ended)
            if self._is_closing:
                raise NodeLostError("the supervisor was closed")
            if pending and (state := placement_group_table(self._group)["state"]) != "CREATED":
                # Ray looks for another place for the bundle, which may not exist. Meanwhile the
                # other bundles of this replica would be useless.
                raise NodeLostError(f"the placement group is {state}")

    def _kill_processes(self) -> None:
        stopped = set[int]() if self._is_closing else self._stop_actors()
        for index, actor in list(self._actors.items()):
            if index not in stopped:
                with suppress(ray.exceptions.RayError):
                    ray.kill(actor)
                del self._actors[index]
        self._remote_ranks = {}
        super()._kill_processes()
        self._store = None

    def _stop_actors(self) -> set[int]:
        """Kill the ranks of the actors, which start the next ranks; return the actors that live."""
        indices = {actor.stop.remote(): index for index, actor in self._actors.items()}
        stopped = set[int]()
        if not indices:
            return stopped
        ended, _ = ray.wait(list(indices), num_returns=len(indices), timeout=KILL_TIMEOUT_S)
        for reference in ended:
            with suppress(ray.exceptions.RayError):
                ray.get(reference)
                stopped.add(indices[reference])
        return stopped

    def _describe_exit(self, rank: int) -> str | None:
        remote_rank = self._remote_ranks.get(rank)
        return super()._describe_exit(rank) if remote_rank is None else remote_rank.describe_exit()


def _rank_environment(
    bundle: Mapping[str, float], ranks: int, config: ServerConfig
) -> dict[str, str]:
    """Return variables of the ranks of a bundle: on CPUs, the threads of each rank."""
    if config.model_config.device != "cpu":
        return {}
    return {"OMP_NUM_THREADS": str(max(1, int(bundle.get("CPU", 1)) // ranks))}
