"""Snapshots of a data directory one after the other: what is complete goes to the bucket while everything runs.

Rule: each round is a snapshot of its own, whole or not there, so the process may be killed at any moment: the newest
snapshot lacks what was written since its round began, and nothing else. A round that finds nothing new reads no file
and writes nothing. Where the bucket holds another installation, or the data directory is gone, nothing is saved: an
empty directory would become the newest snapshot. Of two that save to one place the later one goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from services.files import snapshots
from services.files.bucket import Bucket
from services.files.data_dir import DataDir
from services.files.snapshots import Files, InstallationSnapshot, Tally

PRUNE_EVERY_S = 3600.0


class OtherFollower(Exception):
    """Another one has begun to save to the same place; the message names it."""


class OtherInstallation(Exception):
    """The newest snapshot is not of this data directory; the message says what to do."""


@dataclass(frozen=True)
class Round:
    snapshot: InstallationSnapshot
    tally: Tally
    took_s: float


class ContinuousSnapshots:
    """``keep``: how many snapshots stay; all of them if it is None."""

    def __init__(self, data_dir: Path, bucket: Bucket, keep: int | None = None) -> None:
        self._data_dir = data_dir
        self._bucket = bucket
        self._keep = keep
        self._id = uuid.uuid4().hex
        self._newest: InstallationSnapshot | None = None
        self._was_broken_off = True
        self._pruned_at = -PRUNE_EVERY_S
        self._is_given_up = False

    def round(self) -> Round | None:
        """None where nothing is new. May be repeated after BucketRefused and OSError; what was sent is not sent again.

        Raises OtherFollower, OtherInstallation, SnapshotDamaged, LaterLayout, GivenUp, too.
        """
        started, tally = time.monotonic(), Tally()
        before = self._before()
        self._refuse_another(before)
        resumed = snapshots.unnamed(self._bucket) if self._was_broken_off else set[str]()
        self._was_broken_off = True
        sent = snapshots.send(
            self._data_dir, self._bucket, before, tally, also_there=resumed, is_given_up=lambda: self._is_given_up
        )
        made = dataclasses.replace(sent, follower=self._id)
        is_new = before is None or _contents(made) != _contents(before)
        if is_new:
            snapshots.name_it(self._bucket, made)
        # Where nothing is new the times of this round count, under the name that is in the bucket.
        self._newest = made if before is None or is_new else dataclasses.replace(made, name=before.name)
        self._was_broken_off = False
        if not is_new:
            return None
        if self._keep is not None and time.monotonic() - self._pruned_at >= PRUNE_EVERY_S:
            snapshots.prune(self._bucket, self._keep)
            self._pruned_at = time.monotonic()
        return Round(made, tally, time.monotonic() - started)

    def give_up(self) -> None:
        """The round that is under way ends at its next file, with GivenUp. From any thread."""
        self._is_given_up = True

    def _before(self) -> InstallationSnapshot | None:
        """The newest in the bucket, which another command may have put there."""
        found = snapshots.names(self._bucket)
        if self._newest is not None and found[-1:] == [self._newest.name]:
            return self._newest
        before = snapshots.read(self._bucket, found[-1]) if found else None
        if before and self._newest and before.follower not in (None, self._id):
            raise OtherFollower(
                f"another one saves to {self._bucket.address}, too, since {before.name}: one for each place"
            )
        return before

    def _refuse_another(self, before: InstallationSnapshot | None) -> None:
        path = DataDir(self._data_dir).installation
        theirs = before.files.get(path.name) if before else None
        if before is None or theirs is None:
            return
        where = f"the newest snapshot in {self._bucket.address}, {before.name}, "
        try:
            ours = path.read_bytes()
        except FileNotFoundError:
            raise OtherInstallation(
                f"{where}is of an installation, and {self._data_dir} is of none: restore it, or name another place"
            ) from None
        if hashlib.sha256(ours).hexdigest() != theirs.sha256:
            raise OtherInstallation(f"{where}is of another installation than {self._data_dir}: name another place")


def _contents(snapshot: InstallationSnapshot) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Times aside."""

    def of(files: Files) -> dict[str, str]:
        return {path: one.sha256 for path, one in files.items()}

    return of(snapshot.files), {directory: of(files) for directory, files in snapshot.models.items()}
