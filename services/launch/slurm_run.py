"""``python -m services.launch.slurm_run``: the stack on the allocation of the batch script that runs this.

``gspo launch slurm`` writes that script. Rule: it takes the place of the batch shell, so the signal that Slurm sends
before the time limit (``--signal=B:TERM``) reaches it, and everything leaves in order.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from gspo_core.cli.command import CommandError
from services.files.data_dir import DataDir
from services.launch import placement_options, ports_option
from services.launch.crew_run import Submission, run
from services.launch.installation import Installation, Ports
from services.launch.outside_settings import refuse_decided
from services.launch.placement import PlacementError, place
from services.launch.placement_options import Where, chosen_engine, cluster_wanted
from services.launch.slurm_steps import SlurmSteps, addresses, check_log_path, node_names
from services.launch.topology import Site
from services.state.server import RedisUnsuitable, find_binary

PORTS = {f"{name.upper()}_PORT": getattr(Ports(), name) for name in ports_option.NAMES}
"""Shell variables that move a port, with their defaults."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the launcher takes and the script hands on."""
    placement_options.add_whole(parser)
    add_steps(parser)


def add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--container",
        metavar="IMAGE",
        help="image for every process, where Slurm has the plugin pyxis",
    )
    parser.add_argument("--srun", nargs="+", default=(), metavar="OPTION", help="further options of srun, without --")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.launch.slurm_run", description=__doc__)
    add_options(parser)
    parser.add_argument("--ports", required=True, help=f"numbers {ports_option.HELP}")
    arguments = parser.parse_args()
    try:
        refuse_decided(arguments.data_dir)
        check_log_path(arguments.data_dir)
        nodes = node_names()
        data_dir = DataDir(Path(arguments.data_dir))
        where = Where.IMAGE if arguments.container else Where.HERE
        members = place(cluster_wanted(arguments), Site.BATCH)
        installation = Installation(
            members=members,
            hosts=tuple(addresses(nodes)),
            data_dir=data_dir,
            model=arguments.model,
            python=sys.executable,
            redis_server=str(find_binary().path),
            ports=ports_option.read(arguments.ports, members),
            engine=chosen_engine(arguments, on_gpu=arguments.gpus_per_node > 0, has_keys=True, where=where),
        )
        submission = Submission(Path(arguments.job), arguments.key) if arguments.job else None
        return run(installation, SlurmSteps(nodes, data_dir, _further(arguments)), submission)
    except (CommandError, PlacementError, RedisUnsuitable, OSError) as error:
        print(f"services.launch.slurm_run: {error}", file=sys.stderr)
        return 1


def _further(arguments: argparse.Namespace) -> list[str]:
    options = [f"--{option}" for option in arguments.srun]
    if arguments.container:
        seen = {os.getcwd(), *mounted(arguments.data_dir, arguments.model)}
        if sys.prefix != sys.base_prefix:  # our packages; the interpreter below them is the image's
            seen.add(sys.prefix)
        check_mounts(seen)
        mounts = ",".join(f"{path}:{path}" for path in sorted(seen))
        options += [f"--container-image={arguments.container}", f"--container-mounts={mounts}"]
    return options


def mounted(data_dir: str, model: str) -> set[str]:
    """A model that is no path is a name of the hub."""
    return {data_dir, os.path.dirname(model)} if os.path.isabs(model) else {data_dir}


def check_mounts(paths: Iterable[str]) -> None:
    """Raises CommandError for what ``--container-mounts`` does not take as it is: it has no quotes."""
    for path in sorted(paths):
        if found := next((letter for letter in ",:" if letter in path), None):
            raise CommandError(
                f"--container: {path!r} has a {found!r}, which divides the paths that it mounts: rename it"
            )


if __name__ == "__main__":
    sys.exit(main())
