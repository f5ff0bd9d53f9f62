"""Where weights come from is shown by digests: whoever changes a byte of the past is named, and a kept chain knows more
than the files do.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_core.cli import main
from gspo_core.log import layout
from gspo_core.log.batches import BatchExtra, LoggedBatch, encode_batch
from gspo_core.log.erasing import without_texts
from gspo_core.position import Position
from gspo_core.replay.audit import audit
from gspo_core.replay.chain import BadChain, decode_chain, differences, encode_chain
from gspo_core.replay.past import DamagedPast, NotKept, Past
from gspo_core.types import Asked, Trajectory
from tests.core.learner_support import write_model
from tests.core.past_kit import GROUPS, SIZE, MadePast, make_past, remove_step, spec_of

JOB = "job_a"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def past(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    return make_past(tmp_path_factory.mktemp("jobs") / JOB, spec_of(model_dir))


@pytest.fixture(scope="module")
def chain(past: MadePast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chain") / "job.chain"
    path.write_bytes(encode_chain(audit(Past(past.folder), JOB).chain))
    return path


@pytest.fixture
def folder(past: MadePast, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(past.folder, tmp_path / JOB))


def test_an_audit_reads_the_whole_chain(past: MadePast) -> None:
    found = audit(Past(past.folder), JOB)
    assert [link.step for link in found.chain.links] == [1, 2, 3, 4, 5, 6]
    assert found.chain.start.kind == "base"
    assert "model/model.safetensors" in found.chain.start.files
    assert found.kept_versions == [0, 1, 2, 3, 4, 5, 6]
    assert found.checkpoints == [2, 4, 6]
    assert found.num_episodes == 6 * GROUPS * SIZE
    assert found.num_tokens > found.num_episodes


def test_a_chain_is_read_as_it_was_written(past: MadePast, chain: Path) -> None:
    known = decode_chain(chain.read_bytes())
    assert known == audit(Past(past.folder), JOB).chain
    assert len(known.head) == 64


def test_a_chain_that_was_kept_is_the_beginning_of_a_later_one(past: MadePast) -> None:
    earlier, later = (audit(Past(past.folder), JOB, last).chain for last in (3, 6))
    assert earlier.head != later.head
    assert [*differences(earlier, later)] == []


def test_without_its_oldest_logs_a_chain_begins_with_a_checkpoint(folder: Path, chain: Path) -> None:
    remove_step(folder, layout.BATCHES, 1)
    remove_step(folder, layout.BATCHES, 3)
    found = audit(Past(folder), JOB)
    assert (found.chain.start.kind, found.chain.start.step) == ("checkpoint", 4)
    assert [*differences(decode_chain(chain.read_bytes()), found.chain)] == []
    shutil.rmtree(folder / layout.CHECKPOINTS)
    with pytest.raises(NotKept):
        audit(Past(folder), JOB)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("seed", range(50))
def test_each_byte_that_differs_is_refused_by_name(
    folder: Path, chain: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every file in turn, and of the chain itself."""
    kept = Path(shutil.copy(chain, folder.parent))
    files, chance = [*files_of(folder), kept], random.Random(seed)
    path = files[seed * len(files) // 50]
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    assert main(["audit", str(folder), "--chain", str(kept)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("gspo: ")
    assert any(part in said for part in named_by(path, folder)), said


def named_by(path: Path, folder: Path) -> list[str]:
    """What a message that names the file says."""
    if not path.is_relative_to(folder):
        return ["chain"]
    place = path.relative_to(folder)
    if place.parts[0] == layout.CHECKPOINTS:
        return [place.parts[1]]
    return [path.name, str(place), f"version {int(path.stem)}"] if place.parts[0] == layout.VERSIONS else [path.name]


def test_a_version_older_than_the_log_says_is_found(folder: Path) -> None:
    batch = Past(folder).batch(4)
    assert batch.extra["staleness"] == {"3": 0, "2": 1}
    extra: BatchExtra = {**batch.extra, "staleness": {"3": 0, "2": 0}}
    place = folder / layout.BATCHES / layout.step_name(Position(1, 4))
    place.write_bytes(b"".join(encode_batch(batch.position, batch.groups, extra)))
    with pytest.raises(DamagedPast, match="step 4: version 2 was 1 steps old, the log says 0"):
        audit(Past(folder), JOB)


def test_a_version_that_nobody_recorded_is_found(folder: Path) -> None:
    (folder / layout.VERSIONS / layout.numbered_name(3)).unlink()
    with pytest.raises(DamagedPast, match="step 4: sampled by version 3, of which there is no record"):
        audit(Past(folder), JOB)


def test_batches_that_were_exchanged_whole_are_found_by_the_chain(folder: Path, chain: Path) -> None:
    """Each file alone is as it should be."""
    batch = Past(folder).batch(5)
    place = folder / layout.BATCHES / layout.step_name(Position(1, 5))
    place.write_bytes(b"".join(encode_batch(batch.position, batch.groups[:-1], batch.extra)))
    found = audit(Past(folder), JOB)
    told = [*differences(decode_chain(chain.read_bytes()), found.chain)]
    assert told == ["step 5: its batch log is another one"]
    assert main(["audit", str(folder), "--replay"]) == 1, "training it again shows it without a chain"


def test_groups_of_another_job_are_found(folder: Path) -> None:
    with pytest.raises(DamagedPast, match="step 1 holds groups of job job_a, and this is job job_b"):
        audit(Past(folder), "job_b")


def test_training_again_proves_the_rest(past: MadePast, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(past.folder), "--replay"]) == 0
    assert "every version bit for bit" in capsys.readouterr().out


def test_steps_of_an_episode_are_listed(past: MadePast, capsys: pytest.CaptureFixture[str]) -> None:
    group = 3 * GROUPS
    assert (
        main(["audit", str(past.folder), "--episode", f"{group}/2", "--episode", "999", "--episode", str(group)]) == 0
    )
    said = capsys.readouterr().out
    assert f"episode {group}/2 entered step 4\n" in said
    assert "episode 999 entered no step" in said
    assert main(["audit", str(past.folder), "--episode", str(group), "--json"]) == 0
    members = [f"{group}/{member}" for member in range(SIZE)]
    assert json.loads(capsys.readouterr().out)["entered"] == [{"step": 4, "episodes": members}]


def write_log(folder: Path, batch: LoggedBatch, data: Iterable[bytes]) -> None:
    (folder / layout.BATCHES / layout.step_name(batch.position)).write_bytes(b"".join(data))


def test_an_erased_episode_is_named(folder: Path, chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = Past(folder).batch(4)
    write_log(folder, batch, without_texts(batch, [(3 * GROUPS, 1)]))
    assert main(["audit", str(folder)]) == 0
    assert f"erased in the steps 4 ({3 * GROUPS}/1)" in capsys.readouterr().out
    assert main(["audit", str(folder), "--chain", str(chain)]) == 1
    assert f"step 4: episodes of it were erased since: {3 * GROUPS}/1" in capsys.readouterr().err
    assert main(["audit", str(folder), "--replay"]) == 1
    assert "cannot be trained again" in capsys.readouterr().err


def test_steps_of_a_user_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = Past(folder).batch(2)
    [first, *others], *rest = batch.groups
    asked = Asked(None, "", "messages", "model", 1, 0)
    said = Trajectory(tuple(replace(one, asked=asked, user="ann") for one in first.segments))
    groups = (replace(batch.groups[0], trajectories=(said, *others)), *rest)
    write_log(folder, batch, encode_batch(batch.position, groups, batch.extra))
    assert main(["audit", str(folder), "--user", "ann"]) == 0
    assert f"entered 2 ({GROUPS}/0)" in capsys.readouterr().out
    assert main(["audit", str(folder), "--user", "bob"]) == 0
    assert "entered no step" in capsys.readouterr().out


def test_weights_that_were_carried_away_are_known_by_the_chain_alone(
    past: MadePast, chain: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = shutil.copytree(past.folder / layout.WEIGHTS / "v5", tmp_path / "somewhere")
    assert main(["audit", str(weights), "--chain", str(chain), "--model", str(model_dir)]) == 0
    assert f"after step 5 of job {JOB}, 5 links from the base model" in capsys.readouterr().out
    other = write_model(tmp_path / "other", seed=1)
    assert main(["audit", str(weights), "--chain", str(chain), "--model", str(other)]) == 1
    assert "model.safetensors" in capsys.readouterr().err
    assert main(["audit", str(past.folder / layout.WEIGHTS / "v5")]) == 0
    assert f"job {JOB}: 5 steps" in capsys.readouterr().out
    (weights / "config.json").write_text("{}")
    assert main(["audit", str(weights), "--chain", str(chain)]) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [("--replay",), ("--to", "x.chain"), ("--episode", "1/0"), ("--user", "ann"), ("--json",)]
)
def test_what_needs_a_job_is_refused_of_weights_beside_a_chain(
    more: tuple[str, ...], past: MadePast, chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 after `--replay` would say that something was trained again."""
    assert main(["audit", str(past.folder / layout.WEIGHTS / "v5"), "--chain", str(chain), *more]) == 1
    assert f"{more[0]} is for a job" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["OpenSSH", "PEM"])
def test_a_chain_is_signed_and_known_by_the_public_key(
    past: MadePast, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    keys, others, kept = tmp_path / "keys", tmp_path / "others", tmp_path / "job.chain"
    for place in (keys, others):
        place.mkdir()
        write_keys(place, form)
    assert main(["audit", str(past.folder), "--to", str(kept), "--sign", str(keys / "private")]) == 0
    known = ["audit", str(past.folder), "--chain", str(kept), "--signed-by"]
    assert main([*known, str(keys / "public")]) == 0
    assert main([*known, str(others / "public")]) == 1
    assert "is not what the holder of" in capsys.readouterr().err
    kept.write_bytes(encode_chain(audit(Past(past.folder), JOB, 3).chain))
    assert main([*known, str(keys / "public")]) == 1, "a true chain, and not the one that was signed"
    assert main(["audit", str(past.folder), "--to", str(kept)]) == 1
    assert "is there already" in capsys.readouterr().err


def write_keys(place: Path, form: str) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, code = Ed25519PrivateKey.generate(), serialization
    private, public = {
        "OpenSSH": (code.PrivateFormat.OpenSSH, (code.Encoding.OpenSSH, code.PublicFormat.OpenSSH)),
        "PEM": (code.PrivateFormat.PKCS8, (code.Encoding.PEM, code.PublicFormat.SubjectPublicKeyInfo)),
    }[form]
    (place / "private").write_bytes(key.private_bytes(code.Encoding.PEM, private, code.NoEncryption()))
    (place / "public").write_bytes(key.public_key().public_bytes(*public))


@pytest.mark.parametrize(
    "change", [lambda text: text.replace('"epoch": 1', '"epoch": 2', 1), str.rstrip, lambda _: "[]"]
)
def test_a_chain_that_was_edited_is_refused(chain: Path, change: object) -> None:
    assert callable(change)
    with pytest.raises(BadChain, match="chain"):
        decode_chain(change(chain.read_text()).encode())


def test_a_signature_needs_no_package_of_ours_to_be_absent(past: MadePast, tmp_path: Path) -> None:
    """Without `cryptography` everything but signatures works, and the message says what is missing."""
    import sys

    code = (
        "import sys; sys.modules['cryptography'] = None; from gspo_core.cli import main; "
        f"assert main(['audit', {str(past.folder)!r}]) == 0; "
        f"sys.exit(main(['audit', {str(past.folder)!r}, '--to', {str(tmp_path / 'c')!r}, '--sign', 'key']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "gspo[sign]" in done.stderr, done.stderr
