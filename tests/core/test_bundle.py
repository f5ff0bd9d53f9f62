"""A bundle carries what a replay needs, opens with the library alone, and is refused by name if a byte differs."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gspo_core
from gspo_core.cli import main
from gspo_core.replay.bundle import BadBundle, check_model, unpack, write_bundle
from gspo_core.replay.past import NotKept, Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from tests.core.learner_support import write_model
from tests.core.past_kit import MadePast, make_past, spec_of


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def past(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    return make_past(tmp_path_factory.mktemp("jobs") / "job_a", spec_of(model_dir))


@pytest.fixture(scope="module")
def bundle(past: MadePast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "steps.gspo"
    write_bundle(Past(past.folder), "job_a", 4, 5, path)
    return path


def test_a_bundle_leads_to_the_same_weights(bundle: Path, tmp_path: Path) -> None:
    opened = unpack(bundle, tmp_path)
    assert opened.manifest["job"] == "job_a"
    answer = replay(Past(tmp_path), ReplayQuestion(4, 5))
    assert answer.is_same
    assert [len(step.versions) for step in answer.steps] == [1, 1]


def test_it_needs_nothing_but_the_library_and_the_base_model(bundle: Path, model_dir: Path, tmp_path: Path) -> None:
    """In an empty directory, where no service can be imported, and with the model elsewhere than the job says."""
    library, model = tmp_path / "library", tmp_path / "model"
    shutil.copytree(Path(gspo_core.__file__).parent, library / "gspo_core")
    shutil.copytree(model_dir, model)
    empty = tmp_path / "empty"
    empty.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(library)!r}); sys.modules |= dict.fromkeys(('services', 'redis')); "
        "from gspo_core.cli import main; import gspo_core; "
        f"assert gspo_core.__file__.startswith({str(library)!r}); "
        f"sys.exit(main(['replay', {str(bundle)!r} + '@4-5', '--model', {str(model)!r}]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=empty, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bit for bit") == 2
    assert not list(empty.iterdir())


def test_the_same_past_gives_the_same_bytes(past: MadePast, bundle: Path, tmp_path: Path) -> None:
    write_bundle(Past(past.folder), "job_a", 4, 5, tmp_path / "again.gspo")
    assert (tmp_path / "again.gspo").read_bytes() == bundle.read_bytes()
    with pytest.raises(FileExistsError):
        write_bundle(Past(past.folder), "job_a", 4, 5, tmp_path / "again.gspo")


@pytest.mark.parametrize("seed", range(50))
def test_each_byte_that_differs_is_refused_by_name(bundle: Path, tmp_path: Path, seed: int) -> None:
    """Of every file in turn: somewhere between its header and the next."""
    with zipfile.ZipFile(bundle) as archive:
        members = archive.infolist()
        ends = [*(one.header_offset for one in members[1:]), archive.start_dir]
    number = seed * len(members) // 50
    data, chance = bytearray(bundle.read_bytes()), random.Random(seed)
    data[chance.randrange(members[number].header_offset, ends[number])] ^= 1 << chance.randrange(8)
    changed = tmp_path / "changed.gspo"
    changed.write_bytes(data)
    with pytest.raises(BadBundle) as refused:
        unpack(changed, tmp_path / "out")
    assert any(name in str(refused.value) for name in (members[number].filename, "changed.gspo"))
    assert not (tmp_path / "out").exists()


def test_the_directory_of_a_bundle_is_checked_too(bundle: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        begin = archive.start_dir
    for chance in map(random.Random, range(10)):
        data = bytearray(bundle.read_bytes())
        data[chance.randrange(begin, len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / "changed.gspo").write_bytes(data)
        with pytest.raises(BadBundle):
            unpack(tmp_path / "changed.gspo", tmp_path / "out")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 1, 255])
def test_a_file_that_is_said_to_be_compressed_is_refused_by_name(bundle: Path, tmp_path: Path, method: int) -> None:
    """One byte of the directory is enough for it, and each method fails in its own way."""
    whole = bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        names, place = [one.filename for one in archive.infolist()], archive.start_dir
    changed = tmp_path / "changed.gspo"
    for name in names:
        at = whole.index(name.encode(), place) - 46 + 10  # a record of the directory: its method, then its name
        assert whole[at : at + 2] == b"\0\0"
        changed.write_bytes(whole[:at] + bytes([method]) + whole[at + 1 :])
        with pytest.raises(BadBundle, match=name):
            unpack(changed, tmp_path / "out")
        place = at
    assert not (tmp_path / "out").exists()


def test_another_base_model_is_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    opened = unpack(bundle, tmp_path / "out")
    with pytest.raises(BadBundle, match=r"another base model than the bundle's: model.safetensors"):
        check_model(opened.manifest, other)
    assert main(["replay", f"{bundle}@4", "--model", str(other)]) == 1


def test_the_command_writes_what_the_other_reads(
    past: MadePast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "steps.gspo"
    assert main(["bundle", f"{past.folder}@3", "--to", str(target)]) == 0
    assert main(["bundle", f"{past.folder}@3", "--to", str(target)]) == 1
    capsys.readouterr()
    assert main(["replay", f"{target}@3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_same"]
    with pytest.raises(NotKept):
        write_bundle(Past(past.folder), "job_a", 9, 9, tmp_path / "none.gspo")
