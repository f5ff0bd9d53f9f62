"""``gspo audit``: do these weights come from what the job's files say? Offline, by digests."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_core.cli.command import CommandError
from gspo_core.cli.terminal import say
from gspo_core.json_value import JSON
from gspo_core.log import layout
from gspo_core.log.erasing import users_of
from gspo_core.replay.audit import Audited, audit, check_against, manifest_of, model_difference
from gspo_core.replay.chain import Chain, decode_chain, differences, digests_of, encode_chain
from gspo_core.replay.command import folder_of
from gspo_core.replay.past import DamagedPast, NotKept, Past, PastError, spans
from gspo_core.replay.signing import check_signature, signature_of, write_signed
from gspo_core.types import Trajectory

_STEP = re.compile(r"(?P<job>.+)@(?P<step>\d+)")
_OF_A_JOB = ("--to", "--sign", "--episode", "--user", "--replay", "--json")
"""What needs more than weights and a chain."""
_EPISODE = re.compile(r"(?P<group>\d+)(?:/(?P<member>\d+))?")


@dataclass(frozen=True)
class EpisodeFilter:
    """Episodes that are looked for; without a member, a whole group."""

    given: frozenset[tuple[int, int | None]]
    users: frozenset[str]

    def __call__(self, episode: Trajectory) -> bool:
        group, member = episode.key.group, episode.key.member
        is_given = (group, member) in self.given or (group, None) in self.given
        return is_given or not self.users.isdisjoint(users_of(episode))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check the chain from weights back over steps, batches, tokens and versions to the base model, by the digests "
        "of everything that is kept. Exit status 1, and the name of the file, if one is not what was written."
    )
    parser.add_argument("what", metavar="JOB[@STEP]|WEIGHTS", help="a job's id or directory, or a version's directory")
    parser.add_argument("--chain", type=Path, help="a chain that was kept: what it tells must still be so")
    parser.add_argument("--to", type=Path, help="write the chain to this file; it must not exist")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="sign what --to writes, with an Ed25519 private key")
    parser.add_argument(
        "--signed-by", type=Path, metavar="PUBLIC_KEY", help="the chain of --chain must be signed by it"
    )
    parser.add_argument(
        "--episode", action="append", default=[], metavar="GROUP[/MEMBER]", help="name the steps that it entered"
    )
    parser.add_argument("--user", action="append", default=[], help="name the steps that episodes of this user entered")
    parser.add_argument("--replay", action="store_true", help="train every step of the chain again, and compare")
    parser.add_argument("--model", type=Path, help="where the base model lies (default: where the job says)")
    parser.add_argument("--data-dir", help="where jobs are kept (default: $GSPO_DATA_DIR or .gspo)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(arguments: argparse.Namespace) -> int:
    if (arguments.sign and not arguments.to) or (arguments.signed_by and not arguments.chain):
        raise CommandError("--sign goes with --to, and --signed-by with --chain")
    try:
        known = _known(arguments.chain, arguments.signed_by)
        weights = Path(arguments.what)
        if (weights / layout.WEIGHTS_MANIFEST).is_file():
            if known is not None:
                _refuse_of_a_job(arguments)
                return _tell_of_weights(weights, known, arguments.model)
            folder, last, version = weights.resolve().parents[1], None, manifest_of(weights).version
        else:
            match = _STEP.fullmatch(arguments.what)
            folder = folder_of(match["job"] if match else arguments.what, arguments.data_dir)
            last, version = int(match["step"]) if match else None, None
        return _tell(Past(folder, arguments.model), folder, last, version, known, arguments)
    except FileExistsError as error:
        raise CommandError(f"{error.filename} is there already") from error
    except (PastError, OSError) as error:
        raise CommandError(str(error)) from error
    except ModuleNotFoundError as error:
        raise CommandError(f"signatures need {error.name}, which is not installed here: install gspo[sign]") from error


def _refuse_of_a_job(arguments: argparse.Namespace) -> None:
    """Raises CommandError."""
    if given := next((option for option in _OF_A_JOB if getattr(arguments, option.removeprefix("--"))), None):
        raise CommandError(f"{given} is for a job: weights are held against a chain, by --chain and --model alone")


def _known(path: Path | None, public_key: Path | None) -> Chain | None:
    if path is None:
        return None
    if public_key is not None:
        check_signature(path, public_key)
    return decode_chain(path.read_bytes())


def _tell_of_weights(weights: Path, chain: Chain, model: Path | None) -> int:
    """Weights beside a chain: nothing else is needed."""
    step = check_against(chain, weights)
    if model is not None and (odd := model_difference(chain, model)):
        raise DamagedPast(f"{model} is not the base model of the chain: {', '.join(odd)}")
    begun = {"base": "the base model", "checkpoint": f"the checkpoint of step {chain.start.step}"}
    origin = begun.get(chain.start.kind, f"step {chain.start.step} of its parent")
    say(f"{weights}: as published after step {step} of job {chain.job}, {step - chain.start.step} links from {origin}")
    say(f"head of the chain, step {chain.last}: {chain.head}")
    return 0


def _tell(
    past: Past, folder: Path, last: int | None, version: int | None, known: Chain | None, given: argparse.Namespace
) -> int:
    if version is not None:
        last = _step_of(past, version)
    wanted = EpisodeFilter(frozenset(map(_episode, given.episode)), frozenset(given.user))
    found = audit(past, folder.resolve().name, last, wanted)
    if version is not None and version not in found.kept_versions:
        raise DamagedPast(f"version {version} is not in the history of the job")
    told = [*differences(known, found.chain)] if known is not None else []
    if told:
        raise DamagedPast(f"not as {given.chain} tells: {'; '.join(told)}")
    proof = _trained_again(past, found) if given.replay else None
    if given.to is not None:
        write_signed(given.to, encode_chain(found.chain), given.sign)
    if given.json:
        print(json.dumps(_record(found, proof), indent=1))
    else:
        say(*_lines(found, proof, given))
    return 0 if proof in (None, []) else 1


def _step_of(past: Past, version: int) -> int:
    for one in past.versions():
        if one.version == version:
            return one.step
    raise NotKept(f"there is no record of version {version}")


def _trained_again(past: Past, found: Audited) -> list[int]:
    """The steps whose weights are not those that were published."""
    from gspo_core.replay.question import ReplayQuestion
    from gspo_core.replay.replaying import replay

    chain = found.chain
    if not chain.links:
        return []
    question = ReplayQuestion(chain.start.step + 1, chain.last)
    answer = replay(past, question, lambda text: print(text, file=sys.stderr, flush=True))
    return [step.step for step in answer.steps if not all(one.is_same for one in step.versions)]


def _lines(found: Audited, proof: list[int] | None, given: argparse.Namespace) -> Iterator[str]:
    chain = found.chain
    kinds = {"base": "the base model", "parent": f"step {chain.start.step} of its parent"}
    begun = kinds.get(chain.start.kind, f"the checkpoint of step {chain.start.step}; older batch logs are not kept")
    yield f"job {chain.job}: {len(chain.links)} steps, from {begun}"
    if chain.links:
        yield (
            f"batch logs of steps {spans(link.step for link in chain.links)} intact: {found.num_episodes} episodes, "
            f"{found.num_tokens} sampled tokens, each of a recorded version and as old as the log says"
        )
    if found.foreign_steps:
        yield f"steps {spans(found.foreign_steps)} were fed from its parent: their versions are the parent's"
    recorded = sum(len(one.published) for one in chain.stages)
    kept = spans(found.kept_versions) if found.kept_versions else "none"
    yield f"{recorded} versions recorded; the files of those that are kept ({kept}) are what was published"
    yield f"checkpoints intact: {spans(found.checkpoints) if found.checkpoints else 'none kept'}"
    if proof is not None:
        yield "trained again: every version bit for bit" if not proof else f"trained again: steps {spans(proof)} DIFFER"
    else:
        yield "that the weights follow from the batches was not looked at: --replay trains them again"
    for text in given.episode:
        group, member = _episode(text)
        steps = [step for step, keys in found.entered.items() if any(_is_it(key, group, member) for key in keys)]
        yield f"episode {text} entered {'no step' if not steps else 'step ' + spans(steps)}"
    if given.user:
        entered = [f"{step} ({', '.join(_spelled(keys))})" for step, keys in found.entered.items()]
        yield f"episodes of these users and those named entered {', '.join(entered) or 'no step'}"
    if erased := [f"{link.step} ({', '.join(link.erased)})" for link in chain.links if link.erased]:
        yield f"erased in the steps {', '.join(erased)}: these cannot be trained again"
    yield f"head of the chain: {chain.head}"
    yield from _kept_lines(given)


def _kept_lines(given: argparse.Namespace) -> Iterator[str]:
    """Which kept chain agrees, and where this one was written."""
    if given.chain is not None:
        signed = f", signed by the holder of {given.signed_by}" if given.signed_by is not None else ""
        yield f"as {given.chain} tells{signed}"
    if given.to is not None:
        signature = f", signed in {signature_of(given.to)}" if given.sign is not None else ""
        yield f"written to {given.to}{signature}"


def _spelled(keys: Sequence[tuple[int, int]]) -> Iterator[str]:
    return (f"{group}/{member}" for group, member in keys)


def _is_it(key: tuple[int, int], group: int, member: int | None) -> bool:
    return key[0] == group and member in (None, key[1])


def _record(found: Audited, proof: list[int] | None) -> dict[str, JSON]:
    chain = found.chain
    return {
        "job": chain.job,
        "start": {"kind": chain.start.kind, "step": chain.start.step},
        "steps": [link.step for link in chain.links],
        "digests": list(digests_of(chain)),
        "episodes": found.num_episodes,
        "tokens": found.num_tokens,
        "fed_steps": list(found.foreign_steps),
        "kept_versions": list(found.kept_versions),
        "checkpoints": list(found.checkpoints),
        "entered": [{"step": step, "episodes": list(_spelled(keys))} for step, keys in found.entered.items()],
        "differing_steps": None if proof is None else list(proof),
        "erased": [{"step": link.step, "episodes": list(link.erased)} for link in chain.links if link.erased],
        "head": chain.head,
    }


def _episode(text: str) -> tuple[int, int | None]:
    match = _EPISODE.fullmatch(text.rpartition("-")[2])
    if match is None:
        raise CommandError(f"{text}: an episode is GROUP/MEMBER, a group is its number")
    return int(match["group"]), None if match["member"] is None else int(match["member"])
