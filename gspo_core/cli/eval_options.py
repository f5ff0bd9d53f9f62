"""The options of ``gspo eval``; what it does is in ``evaluate``."""

from __future__ import annotations

import argparse

from gspo_core.cli.env_options import Actions, AddServer

EXAMPLES = """MODEL is one of
  path/to/model             a directory with a model's files; its engine is started here (needs the service)
  OWNER/NAME                the same of the hub, once `gspo fetch` has fetched it
  JOB, JOB/EPOCH/STEP       the newest checkpoint of a job, or one of them (--url)
  https://host/v1#NAME      any API that speaks OpenAI's chat completions; the key comes from --key-env
  DIR                       for --against: an evaluation that was kept with --out"""


def add_eval(commands: Actions, add_server: AddServer) -> None:
    parser = commands.add_parser(
        "eval",
        help="score an environment with a model or an API, before anything is trained",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="what is scored")
    _add_world(parser)
    _add_policy(parser)
    parser.add_argument("--against", metavar="MODEL", help="play the same with this one, and compare task by task")
    parser.add_argument("--out", metavar="DIR", help="keep the episodes there, and go on with those that it holds")
    parser.add_argument("--concurrency", type=int, default=16, help="episodes at a time (default: 16)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_server(parser)
    parser.set_defaults(run=_run)


def _add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", required=True, metavar="REF[,CONFIG]", help="file.py:Class, package.module:Class")
    parser.add_argument("--config", metavar="JSON", help="keyword arguments of the class")
    parser.add_argument("--agent", metavar="JSON", help='how its agent is started: {"command": ["python", "a.py"]}')
    parser.add_argument("--n", type=int, default=100, help="number of tasks; all, if there are fewer (default: 100)")
    parser.add_argument("--samples", type=int, default=1, help="episodes of each task (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of tasks, the environment and the sampling")
    parser.add_argument("--split", choices=["eval", "train"], help="default: eval, if it has held-out tasks")
    parser.add_argument("--limits", metavar="JSON", help='as in a job: {"max_turns": 4}')


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, help="default: 1 for a model here, the API's own for an API")
    parser.add_argument("--max-new-tokens", type=int, help="of one turn of a model here (default: 1024)")
    parser.add_argument("--chat", metavar="JSON", help="how a model here is spoken to, as in a job")
    parser.add_argument("--device", help="of a model here: cpu, cuda, auto (default)")
    parser.add_argument("--body", metavar="JSON", help='further fields of each request to an API: {"max_tokens": 512}')
    parser.add_argument("--key-env", metavar="NAME", help="variable with the API's key (default: OPENAI_API_KEY)")
    parser.add_argument("--against-key-env", metavar="NAME", help="the same for --against (default: that of --key-env)")


def _run(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.evaluate import run

    return run(arguments)
