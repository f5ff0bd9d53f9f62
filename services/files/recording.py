"""What a job that is trained on recorded episodes is brought of them: ``recorded/``, laid out as a job's directory.

The rule: once it is there, nothing else is needed, and the files of the other job are never written. It is there whole
or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gspo_core.log import layout
from gspo_core.log.batches import LoggedBatch, encode_batch
from gspo_core.log.changes import Without, lessened
from gspo_core.log.recording import NoSuchEpisode, Rewards, recording, rescored, unknown
from gspo_core.replay.past import NotKept, Past, spans
from gspo_core.types import Group
from services.files.durable import make_directory, whole_directory
from services.files.job_dir import JobDir

__all__ = ["NoSuchEpisode", "Rewards", "bring_recording", "changed_log", "recorded_steps", "write_recording"]


def recorded_steps(source: JobDir, first: int | None, last: int | None) -> tuple[int, ...]:
    """The steps from ``first`` to ``last`` (None: as far as kept). Raises PastError if a batch is not kept."""
    kept = Past(source.path).batches
    if not kept:
        raise NotKept("no batch log of the job is kept")
    begin, end = min(kept) if first is None else first, max(kept) if last is None else last
    # Their number first: a step that was never taken may have any number.
    if not 0 <= end - begin < len(kept) or any(step not in kept for step in range(begin, end + 1)):
        raise NotKept(f"steps {begin} to {end}: kept are the batch logs of {spans(kept)}")
    return tuple(range(begin, end + 1))


def bring_recording(source: JobDir, child: JobDir, steps: Sequence[int], rewards: Rewards) -> None:
    """The batches of these steps. Raises PastError, NoSuchEpisode, OSError."""
    past = Past(source.path)
    require_known(rewards, past, steps)
    accepted = source.accepted.read_bytes()
    write_recording(child, accepted, recording(map(past.batch, steps), rewards))


def write_recording(child: JobDir, accepted: bytes, batches: Iterable[LoggedBatch]) -> None:
    """``accepted``: the record of the job that played the episodes."""
    with whole_directory(child.recorded.path) as target:
        (target / layout.ACCEPTED).write_bytes(accepted)
        make_directory(target / layout.BATCHES)
        for batch in batches:
            path = target / layout.BATCHES / layout.step_name(batch.position)
            path.write_bytes(b"".join(encode_batch(batch.position, batch.groups, batch.extra)))


def changed_log(past: Past, step: int, rewards: Rewards, without: Without) -> bytes | None:
    """The log of ``step`` with other rewards and without the rest; None where nothing of it changes.

    Raises PastError, NoSuchEpisode, ImpossibleChange.
    """
    batch = past.batch(step)  # an erased episode in it may be one that is left out
    changed = lessened(rescored(batch, rewards), without)
    return None if changed is batch else b"".join(encode_batch(changed.position, changed.groups, changed.extra))


def require_known(rewards: Rewards, past: Past, steps: Iterable[int], without: Without | None = None) -> None:
    """Checks that every reward is for an episode of these steps. Raises NoSuchEpisode, PastError, ImpossibleChange."""
    taken = (rescored(lessened(past.batch(step), without or Without()), rewards) for step in steps)
    if rewards and (wrong := unknown(rewards, taken)):
        raise NoSuchEpisode(f"there is no episode {', '.join(wrong[:5])} in the steps that are taken")


def in_batches(groups: Sequence[Group], size: int) -> Iterator[LoggedBatch]:
    """Groups that were in no batch yet, as batches of ``size``, with tokens that count as fresh."""
    for begin in range(0, len(groups), size):
        some = tuple(groups[begin : begin + size])
        versions = sorted({one.version for group in some for episode in group for one in episode.segments})
        yield LoggedBatch(1, 1 + begin // size, some, {"staleness": {str(version): 0 for version in versions}})
