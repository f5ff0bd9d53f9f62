"""``gspo launch ray``: runs the stack on a Ray cluster that exists, until its job is over or until told to leave.

Rule: the cluster needs what this command runs from (a checkout or an installation), its Python and the data directory
under the same paths on every node, and nothing that this command started is left when it ends. Ray itself is an extra
(``gspo[ray]``), imported when the command runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import uuid
from pathlib import Path

from gspo_core.cli.command import CommandError
from services.files.data_dir import DataDir
from services.launch import placement_options, ports_option
from services.launch.crew_run import Submission
from services.launch.crew_run import run as run_crew
from services.launch.engine_command import EngineCommand
from services.launch.installation import CODE, Installation, Ports
from services.launch.outside_settings import refuse_decided
from services.launch.placement import Member, PlacementError, described, place
from services.launch.placement_options import Where, check_engine, check_key, chosen_engine, cluster_wanted, model_of
from services.launch.topology import Site

HELP = "run the stack on a Ray cluster"
HOW_TO_INSTALL = "pip install -e '.[ray]' in a checkout, pip install ray beside the wheels"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="auto", help="of the cluster (default: the one of this machine)")
    placement_options.add_whole(parser)
    parser.add_argument("--ports", default=ports_option.DEFAULT, help=f"numbers {ports_option.HELP}")
    placement_options.add_plan(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError."""
    check_key(arguments)
    refuse_decided(arguments.data_dir)
    try:
        members = place(cluster_wanted(arguments), Site.BATCH)
        ports = ports_option.read(arguments.ports, members)
        where = Where.UNSEEN if arguments.plan else Where.HERE
        engine = chosen_engine(arguments, on_gpu=arguments.gpus_per_node > 0, has_keys=True, where=where)
        check_engine(engine, members)
    except PlacementError as error:
        raise CommandError(str(error)) from error
    if arguments.plan:
        print(described(members, nodes=arguments.nodes))
        return 0
    if importlib.util.find_spec("ray") is None:
        raise CommandError(f"Ray is not installed: {HOW_TO_INSTALL}")
    return _on_ray(arguments, members, ports, engine)


def _on_ray(
    arguments: argparse.Namespace, members: tuple[Member, ...], ports: Ports, engine: EngineCommand | None
) -> int:
    try:
        import ray

        from services.launch.ray_places import RayPlace
    except ImportError as error:
        raise CommandError(f"Ray cannot be imported ({error}): {HOW_TO_INSTALL}") from error
    from services.state.server import RedisUnsuitable, find_binary

    data_dir = DataDir(Path(arguments.data_dir).absolute())
    # Actors import the code that runs here, wherever the workers of the cluster stand and this was typed. Those without
    # GPUs see none: of itself Ray would leave them all of their node's.
    variables = {"env_vars": {"PYTHONPATH": str(CODE), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}}
    try:
        ray.init(address=arguments.address, log_to_driver=False, runtime_env=variables)
        with RayPlace(members, data_dir, CODE) as places:
            installation = Installation(
                members=members,
                hosts=tuple(places.addresses()),
                data_dir=data_dir,
                model=model_of(arguments),
                python=sys.executable,
                redis_server=str(find_binary().path),
                ports=ports,
                engine=engine,
            )
            key = arguments.key or f"ray-{uuid.uuid4().hex}"
            submission = Submission(Path(arguments.job).absolute(), key) if arguments.job else None
            return run_crew(installation, places, submission)
    except (ConnectionError, TimeoutError, RedisUnsuitable) as error:
        raise CommandError(str(error)) from error
    finally:
        ray.shutdown()
