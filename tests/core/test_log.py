"""The bytes of a job's files are those that the releases before wrote, and read back as what went in."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import gspo_core.log
from gspo_core.log.batches import (
    HEADER_BYTES,
    DamagedBatch,
    UnknownBatchSchema,
    decode_batch,
    encode_batch,
    group_numbers,
    index_length,
)
from gspo_core.log.checkpoints import (
    UnknownCheckpointFormat,
    decode_checkpoint,
    decode_fork,
    decode_lineage,
    encode_checkpoint,
    encode_fork,
)
from gspo_core.log.history import forks_among
from gspo_core.log.lineage import Lineage
from gspo_core.log.manifests import decode_manifest, decode_row, encode_manifest, encode_row
from gspo_core.log.records import AcceptedJob, DamagedRecord, VersionRecord, decode_record, encode_record
from gspo_core.log.trained import decode_trained, encode_trained
from gspo_core.position import Position
from gspo_core.types import Group
from tests.core.logged import (
    ACCEPTED,
    EPOCH,
    EXTRA,
    LEARNER_MANIFEST,
    LINEAGE,
    LOGPROBS,
    MANIFEST,
    PARENT,
    STATUS,
    STEP,
    WRITTEN,
    groups,
)

AT = Position(EPOCH, STEP)
LEARNER = hashlib.sha256(LEARNER_MANIFEST).hexdigest()


def written(name: str) -> bytes:
    return (WRITTEN / name).read_bytes()


def content(batch: list[Group] | tuple[Group, ...]) -> list[Any]:
    return [(one.job, one.group, one.split, one.task_index, one.size, [t.segments for t in one]) for one in batch]


class TestBytesOfTheReleaseBefore:
    def test_a_batch_log(self) -> None:
        assert b"".join(encode_batch(AT, groups(), EXTRA)) == written("batch")
        read = decode_batch(written("batch"))
        assert (read.position, read.extra) == (AT, EXTRA)
        assert content(read.groups) == content(groups())
        assert [one.key.member for one in read.trajectories] == [0, 1, 2, 1]

    def test_log_probs_of_trained_tokens(self) -> None:
        assert encode_trained(LOGPROBS) == written("trained")
        read = decode_trained(written("trained"))
        assert {key: values.tobytes() for key, values in read.items()} == {
            (key.group, key.member): values.tobytes() for key, values in LOGPROBS.items()
        }

    def test_manifests_of_weights(self) -> None:
        assert encode_manifest(MANIFEST) == written("weights_manifest.json")
        assert encode_row(MANIFEST).encode() == written("published_manifest.json")
        assert decode_manifest(written("weights_manifest.json")) == MANIFEST
        assert decode_row(written("published_manifest.json")) == MANIFEST

    def test_records_of_a_job(self) -> None:
        accepted = AcceptedJob(**ACCEPTED)  # type: ignore[arg-type]
        version = VersionRecord(MANIFEST.version, STEP, encode_row(MANIFEST))
        for record, name in ((accepted, "job.json"), (STATUS, "status.json"), (version, "version.json")):
            assert encode_record(record) == written(name)
        assert AcceptedJob(**decode_record(written("job.json"))) == accepted
        assert decode_record(written("status.json")) == STATUS
        assert VersionRecord(**decode_record(written("version.json"))) == version

    def test_checkpoints(self) -> None:
        lineage = Lineage(**LINEAGE)  # type: ignore[arg-type]
        assert encode_checkpoint(AT, lineage, LEARNER) == written("checkpoint.json")
        assert decode_checkpoint(written("checkpoint.json"), AT, LEARNER) == lineage
        assert decode_lineage(written("lineage.json")) == lineage

    def test_where_an_epoch_forked_off(self) -> None:
        assert encode_fork(Position(*PARENT)) == written("epoch.json")
        assert decode_fork(written("epoch.json")) == PARENT


class TestDamage:
    def test_a_batch_log_with_any_byte_changed_or_cut_off_is_refused(self) -> None:
        whole = written("batch")
        for place in range(len(whole)):
            for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
                with pytest.raises(DamagedBatch):
                    decode_batch(damaged)

    def test_the_schema_of_another_release_is_told_from_damage(self) -> None:
        whole = written("batch")
        with pytest.raises(UnknownBatchSchema, match="schema 9; this release reads schemas 1 to 3"):
            decode_batch(whole[:8] + b"\x09" + whole[9:])

    def test_a_later_record_of_a_fork_is_told_from_damage(self) -> None:
        """And not passed over for its copy."""
        with pytest.raises(UnknownCheckpointFormat, match="has the format 2, this release reads 1"):
            forks_among(["epoch000002.json"], lambda _: b'{"format": 2, "from": [1, 4]}')

    def test_the_groups_of_a_batch_are_read_from_its_index_alone(self) -> None:
        whole = written("batch")
        length = index_length(whole[:HEADER_BYTES])
        assert group_numbers(whole[HEADER_BYTES : HEADER_BYTES + length]) == (4, 2, 9)
        for header in (b"", whole[: HEADER_BYTES - 1]):
            with pytest.raises(DamagedBatch):
                index_length(header)
        for index in (b"{}", b"[]", whole[HEADER_BYTES : HEADER_BYTES + length - 1]):
            with pytest.raises(DamagedBatch):
                group_numbers(index)

    @pytest.mark.parametrize(
        ("position", "learner"), [(Position(EPOCH, STEP + 1), LEARNER), (AT, None), (AT, "0" * 64)]
    )
    def test_a_checkpoint_of_another_place_or_learner_is_damage(self, position: Position, learner: str | None) -> None:
        with pytest.raises(ValueError, match=r"renamed|learner's manifest"):
            decode_checkpoint(written("checkpoint.json"), position, learner)

    def test_a_checkpoint_of_another_format_is_told_from_damage(self) -> None:
        changed = written("checkpoint.json").replace(b'"format": 2', b'"format": 3')
        with pytest.raises(ValueError, match="sha256"):
            decode_checkpoint(changed, AT, LEARNER)
        with pytest.raises(UnknownCheckpointFormat, match="format 3"):
            decode_checkpoint(_signed_again(changed), AT, LEARNER)

    @pytest.mark.parametrize("data", [b"", b"[]", b'{"a": 1'])
    def test_what_is_no_object_is_no_record(self, data: bytes) -> None:
        with pytest.raises(DamagedRecord):
            decode_record(data)

    def test_a_record_of_a_later_schema_is_refused_by_name(self) -> None:
        assert decode_record(b'{"schema": 2, "a": 1}') == {"a": 1}
        for number in ("3", '"1"', "0", "null"):
            with pytest.raises(DamagedRecord, match="this release reads up to 2: go on with the release that wrote it"):
                decode_record(b'{"schema": ' + number.encode() + b', "a": 1}')


def _signed_again(data: bytes) -> bytes:
    record = json.loads(data)
    del record["sha256"]
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({**record, "sha256": digest}).encode()


def test_the_log_opens_no_file_and_asks_no_clock() -> None:
    """It turns bytes into nouns; where the bytes lie is the business of services."""
    forbidden = {"os", "pathlib", "io", "time", "datetime", "tempfile", "shutil", "socket", "random"}
    for path in Path(gspo_core.log.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            alias.name.partition(".")[0] for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names
        }
        imported |= {str(one.module).partition(".")[0] for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
        called = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
        assert not imported & forbidden, path
        assert "open" not in called, path
