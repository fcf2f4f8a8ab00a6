"""The command `preamble ray`: deploys a model in a Ray cluster, and manages the deployment.

It imports Ray only if it needs a cluster: `deploy --print` works without Ray.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from math import inf
from typing import Any

import yaml

from gpt.errors import ConfigError
from gpt.settings import setting_fields, short_repr
from serving.config import ServerConfig
from serving.ray.application import Ports, Scale, application_config, cluster_config
from serving.ray.placement import choose_node_ranks, replica_bundles

# Settings of the server of `preamble serve`, which a replica does not have.
SERVER_SETTINGS = ("host", "port", "http_port")
# A name is a part of routes and of the names of placement groups.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def ray_parser(serve_parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser; `deploy` also has the flags of `serve_parser`."""
    parser = argparse.ArgumentParser(
        prog="preamble ray", description="Serve a model with Ray Serve, on several nodes."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    deploy = actions.add_parser(
        "deploy",
        help="deploy a model, or change a deployment",
        description="Deploy a model, or change a deployment: changed replicas replace the others "
        "one after the other. The settings are those of `preamble serve`; their paths must exist "
        "on all nodes.",
        parents=[serve_parser],
        conflict_handler="resolve",
    )
    _add_deploy_flags(deploy)
    status = actions.add_parser("status", help="print the replicas, and what waiting ones lack")
    status.add_argument("name", nargs="?", help="only this deployment")
    drain = actions.add_parser("drain", help="move the replicas of a node to other nodes")
    drain.add_argument("node", metavar="NODE", help="address of the node, or its ID in Ray")
    drain.add_argument(
        "--deadline",
        metavar="S",
        type=float,
        default=600.0,
        help="seconds after which the node ends (default: 600)",
    )
    remove = actions.add_parser("remove", help="finish the open calls, then remove a deployment")
    remove.add_argument("name", help="name of the deployment")
    for action in (deploy, status, drain, remove):
        action.add_argument(
            "--address",
            metavar="HOST:PORT",
            default="auto",
            help="address of the cluster's head (default: the cluster of this node)",
        )
    return parser


def _add_deploy_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--name", default="preamble", help="name of the deployment (default: preamble)")
    add(
        "--replicas",
        metavar="N",
        type=int,
        help="number of replicas, with --min or --max at the start (default: 1)",
    )
    add("--min", metavar="N", type=int, help="least number of replicas, also 0: scale by load")
    add("--max", metavar="N", type=int, help="largest number of replicas: scale by load")
    add(
        "--scale-up-after",
        metavar="S",
        type=float,
        default=10.0,
        help="seconds for which requests must wait before a replica is added (default: 10)",
    )
    add(
        "--scale-down-after",
        metavar="S",
        type=float,
        default=300.0,
        help="seconds for which a replica must be unneeded before it is removed (default: 300)",
    )
    add(
        "--surge",
        metavar="PERCENT",
        type=int,
        default=0,
        help="replicas that a change may start before it stops others (default: 0)",
    )
    add(
        "--node-ranks",
        metavar="N",
        type=int,
        help="ranks of a replica on one node (default: the most for which there are nodes; with "
        "--print, the ranks of a pipeline stage)",
    )
    add("--rank-cpus", metavar="N", type=float, default=1.0, help="CPUs of a rank (default: 1)")
    add(
        "--rank-gpus",
        metavar="N",
        type=float,
        help="GPUs of a rank (default: 1 with --device cuda, else 0)",
    )
    add("--later", action="store_true", help="deploy even if the cluster has too few nodes now")
    add("--print", action="store_true", help="print the configuration of Serve, without a cluster")
    add(
        "--wait",
        metavar="S",
        type=float,
        default=600.0,
        help="wait this long until all replicas run (default: 600; 0: do not wait)",
    )
    add("--port", type=int, default=9000, help="gRPC port of Serve's proxies (default: 9000)")
    add("--http-port", type=int, default=8000, help="HTTP port of Serve's proxies (default: 8000)")
    add(
        "--haproxy",
        action="store_true",
        help="the cluster's proxies are HAProxy (RAY_SERVE_ENABLE_HA_PROXY=1 on all nodes)",
    )
    add("--host", help=argparse.SUPPRESS)


def run(argv: Sequence[str], serve_parser: argparse.ArgumentParser) -> int:
    """Run `preamble ray`, and return its exit status."""
    parser = ray_parser(serve_parser)
    args = parser.parse_args(argv)
    if args.action == "deploy":
        return _deploy(args, parser)
    if args.action == "drain":
        _check_number(args, "deadline")
    cluster = _import_cluster()
    cluster.connect(args.address)
    if args.action == "drain":
        cluster.drain_node(args.node, args.deadline)
        return 0
    if args.action == "remove":
        cluster.remove(args.name)
        return 0
    states = cluster.application_states()
    if args.name is not None and args.name not in states:
        raise ConfigError(f"no deployment is called {args.name!r}; `preamble ray status` lists all")
    selected = [state for name, state in states.items() if args.name in (None, name)]
    for state in selected:
        for line in state.lines():
            _write(line)
    return 0 if all(state.is_complete for state in selected) else 1


def _deploy(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.host is not None:
        parser.error("--host: Serve's proxies listen on all addresses of their nodes")
    _check_flags(args)
    settings = {
        key: value
        for key, value in vars(args).items()
        if key in setting_fields(ServerConfig) and key not in SERVER_SETTINGS
    }
    config = ServerConfig.read(args.config, settings, profile=args.profile)
    _check_exposure(config)
    scale = _scale(args)
    resources = {"CPU": args.rank_cpus, "GPU": _rank_gpus(args, config)}
    resources = {name: amount for name, amount in resources.items() if amount}
    if not resources:
        raise ConfigError(
            "--rank-cpus and --rank-gpus are 0, so a rank would need no resource and Ray could not "
            "place it; give at least one of them"
        )
    ports = Ports(args.port, args.http_port)
    parallel = config.parallel_config
    if args.print:
        node_ranks = args.node_ranks or parallel.stage_ranks
        bundles = replica_bundles(parallel, node_ranks, resources)
        application = application_config(
            args.name, config, bundles, scale, args.surge, haproxy=args.haproxy
        )
        yaml.safe_dump(cluster_config(ports, [application]), sys.stdout, sort_keys=False)
        return 0
    cluster = _import_cluster()
    cluster.connect(args.address)
    if args.later:
        node_ranks = args.node_ranks or parallel.stage_ranks
    else:
        nodes = cluster.node_resources()
        node_ranks = choose_node_ranks(parallel, resources, nodes, args.node_ranks)
    bundles = replica_bundles(parallel, node_ranks, resources)
    application = application_config(
        args.name, config, bundles, scale, args.surge, haproxy=args.haproxy
    )
    cluster.deploy(application, ports)
    if args.wait == 0:
        return 0
    state = None
    for state in cluster.wait_until_complete(args.name, args.wait):
        for line in state.lines():
            _write(line)
    return 0 if state is not None and state.is_complete else 1


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that Ray or Serve would refuse, or never finish, later."""
    if not NAME_PATTERN.fullmatch(args.name):
        raise ConfigError(
            f"--name is {short_repr(args.name)}; it must have 1 to 63 letters, digits, dots, "
            "dashes and underscores, and begin with a letter or digit"
        )
    for name in ("scale_up_after", "scale_down_after", "wait", "rank_cpus", "rank_gpus"):
        _check_number(args, name)
    if not 0 <= args.surge <= 100:
        raise ConfigError(f"--surge is {args.surge}; it must be from 0 to 100")
    if args.node_ranks is not None and args.node_ranks < 1:
        raise ConfigError(f"--node-ranks is {args.node_ranks}; it must be at least 1")
    for name in ("port", "http_port"):
        port = getattr(args, name)
        if not 1 <= port <= 65535:
            raise ConfigError(f"{_flag(name)} is {port}; it must be from 1 to 65535")
    if args.port == args.http_port:
        raise ConfigError(f"--port and --http-port are both {args.port}; give different ports")


def _check_number(args: argparse.Namespace, name: str) -> None:
    number = getattr(args, name)
    if number is not None and not 0 <= number < inf:
        raise ConfigError(f"{_flag(name)} is {number:g}; it must be a number of at least 0")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _scale(args: argparse.Namespace) -> Scale:
    initial = args.replicas
    minimum, maximum = args.min, args.max
    if minimum is None:
        minimum = 1 if initial is None or maximum is not None else initial
    if maximum is None:
        maximum = max(minimum, 1 if initial is None else initial)
    initial = max(minimum, 1) if initial is None else initial
    if not 0 <= minimum <= initial <= maximum or maximum == 0:
        raise ConfigError(
            f"--replicas is {initial}, from --min {minimum} to --max {maximum}; the number of "
            "replicas must be in this range, and --max at least 1"
        )
    return Scale(minimum, maximum, initial, args.scale_up_after, args.scale_down_after)


def _rank_gpus(args: argparse.Namespace, config: ServerConfig) -> float:
    if args.rank_gpus is not None:
        return float(args.rank_gpus)
    return 1.0 if config.model_config.device.startswith("cuda") else 0.0


def _check_exposure(config: ServerConfig) -> None:
    """Refuse settings that do not fit to Serve's proxies, which other machines can reach."""
    security = config.security_config
    if security.tls_cert is not None:
        raise ConfigError(
            "tls_cert is set, but the gRPC proxies of Ray Serve have no TLS; remove it, and "
            "encrypt in a proxy in front of them"
        )
    if security.tokens is None and not security.insecure:
        raise ConfigError(
            "the gRPC proxies of Ray Serve are reachable from other machines, and there are no "
            "tokens; set tokens in the --config file, or allow it with --insecure"
        )


def _import_cluster() -> Any:
    try:
        from serving.ray import cluster
    except ImportError as error:
        raise ConfigError(
            f"{error.name or 'a package'} is not installed; run pip install 'preamble[ray]'"
        ) from None
    return cluster


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
