"""A state restores a learner bit for bit, whatever killed it; a damaged one is refused and changes nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from gspo_core.learner.state import (
    MANIFEST,
    InvalidState,
    is_parameter,
    read_state,
    restore_tensors,
    training_tensors,
    write_manifest,
    write_shard,
)
from gspo_core.learner_config import LoraConfig, OptimizerConfig
from tests.apparatus.warm_python import WarmPython
from tests.core import learner_process
from tests.core.learner_process import NUM_STEPS, state_directory
from tests.core.learner_support import (
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)
from tests.patience import HANG_S

SHARD = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture
def _one_thread():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kill_when(process: subprocess.Popen[bytes], path: Path) -> None:
    """By a signal that nobody handles, as soon as a file exists, whatever the process is doing with it."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "the learner ended before it could be killed"
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.0005)
    process.send_signal(signal.SIGUSR1)  # a SIGKILL could not be passed on to what a warm interpreter runs
    assert process.wait() == -signal.SIGUSR1


DIES_WHILE_IT_FLUSHES = """
import os, signal, sys
from pathlib import Path
from gspo_core.learner import state as learner_state
learner_state.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
learner_state.write_manifest(Path(sys.argv[1]), 1, {"counters": {}, "model": "?"})
"""


def test_a_manifest_that_exists_is_complete(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython
) -> None:
    """Killed with the content written but not on disk yet, it left no manifest, and the next one can be written."""
    write_shard(tmp_path, 0, {"x": torch.ones(2)})
    script = tmp_path_factory.mktemp("script") / "dies.py"
    script.write_text(DIES_WHILE_IT_FLUSHES)
    dead = subprocess.run([warm_python.path, script, str(tmp_path)], check=False, timeout=HANG_S)
    assert dead.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "it was killed before it wrote anything"
    with pytest.raises(InvalidState, match="no complete state"):
        read_state(tmp_path, 0, 1)
    write_shard(tmp_path, 0, {"x": torch.zeros(2)})
    write_manifest(tmp_path, 1, {"counters": {}, "model": "!"})
    content, tensors = read_state(tmp_path, 0, 1)
    assert content["model"] == "!"
    assert not tensors["x"].any()


def test_a_manifest_is_never_replaced(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, {"x": torch.ones(2)})
    write_manifest(tmp_path, 1, {"model": "first"})
    with pytest.raises(FileExistsError):
        write_manifest(tmp_path, 1, {"model": "second"})
    assert read_state(tmp_path, 0, 1)[0]["model"] == "first"
    assert {path.name for path in tmp_path.iterdir()} == {SHARD, MANIFEST}


@pytest.mark.timeout(300)  # four processes start, which is slow on a busy machine
@pytest.mark.usefixtures("_one_thread")
def test_killed_three_times_it_ends_bit_identical(tmp_path: Path, warm_python: WarmPython) -> None:
    """The victims are processes; the reference ran undisturbed in this one."""
    for name in ("whole", "killed"):
        write_model(tmp_path / name / "model")
    learner_process.resume(tmp_path / "whole")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [warm_python.path, learner_process.__file__, "resume", str(tmp_path / "killed")]
    steps = sorted(random.Random(7).sample(range(1, NUM_STEPS), 3))
    for number, step in enumerate(steps):
        # the first dies with half a state, the others at a step boundary or just after it
        path = state_directory(tmp_path / "killed", step) / (SHARD if number == 0 else MANIFEST)
        kill_when(subprocess.Popen(command, env=environment), path)
    subprocess.run(command, env=environment, check=True, timeout=HANG_S)
    for step in (steps[0], NUM_STEPS):
        first, second = (state_directory(tmp_path / name, step) for name in ("whole", "killed"))
        assert (first / SHARD).read_bytes() == (second / SHARD).read_bytes()
        assert (first / MANIFEST).read_bytes() == (second / MANIFEST).read_bytes()


def test_a_state_holds_moments_counters_and_random_state(model_dir: Path, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(lr=1e-2, schedule="linear", decay_steps=9)
    first, second = (make_learner(model_dir, optimizer=optimizer, seed=seed) for seed in (0, 0))
    sequences = make_sequences(8)
    with_behavior(first, sequences)
    first.step(sequences)
    first.save_state(tmp_path / "state")
    torch.rand(3)
    expected = first.step(sequences)
    noise = torch.rand(3)
    second.load_state(tmp_path / "state")
    torch.rand(3)
    assert second.step(sequences) == expected
    assert torch.equal(torch.rand(3), noise)
    assert second.counters == first.counters
    assert largest_difference(weights(first), weights(second)) == 0


@pytest.mark.parametrize("saved_on", ["cpu", "cuda"])
def test_a_gpu_loads_what_was_saved_on_either_device(saved_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU saves the random state of one."""
    model = torch.nn.Linear(2, 2)
    optimizer, restored = torch.optim.AdamW(model.parameters()), list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _device: restored.append(state))
    of_the_gpu = {"random/cuda": torch.ones(16, dtype=torch.uint8)} if saved_on == "cuda" else {}
    tensors = training_tensors(model, optimizer, torch.device("cpu")) | of_the_gpu
    restore_tensors(model, optimizer, torch.device("cuda"), tensors)
    assert restored == list(of_the_gpu.values())


def test_without_the_moments_it_would_not_go_on_the_same(model_dir: Path, tmp_path: Path) -> None:
    """The negative of the test above: what it compares does depend on the moments."""
    first = make_learner(model_dir, optimizer=OptimizerConfig(lr=1e-2))
    sequences = make_sequences(8)
    with_behavior(first, sequences)
    first.step(sequences)
    first.save_weights(tmp_path / "model")
    second = make_learner(tmp_path / "model", optimizer=OptimizerConfig(lr=1e-2))
    second.counters = first.counters
    first.step(sequences)
    second.step(sequences)
    assert largest_difference(weights(first), weights(second)) > 1e-4


def flip_a_byte(directory: Path) -> None:
    content = bytearray((directory / SHARD).read_bytes())
    content[-5] ^= 1
    (directory / SHARD).write_bytes(content)


def cut_the_manifest(directory: Path) -> None:
    (directory / MANIFEST).write_text((directory / MANIFEST).read_text()[:-20])


def change(key: str, value: object) -> object:
    def damage(directory: Path) -> None:
        manifest = json.loads((directory / MANIFEST).read_text())
        (directory / MANIFEST).write_text(json.dumps({**manifest, key: value}))

    return damage


DAMAGES = {
    "no manifest": (lambda directory: (directory / MANIFEST).unlink(), "no complete state"),
    "half a manifest": (cut_the_manifest, "damaged"),
    "a flipped byte": (flip_a_byte, "not what its manifest says"),
    "no shard": (lambda directory: (directory / SHARD).unlink(), "not what its manifest says"),
    "other ranks": (change("num_ranks", 2), "2 ranks"),
    "another format": (change("format", 99), "format 99"),
    "another model": (change("content", {"model": "?", "counters": {}}), "another model"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_state_is_refused_and_changes_nothing(
    model_dir: Path, tmp_path: Path, damage: str
) -> None:
    spoil, reason = DAMAGES[damage]
    learner = make_learner(model_dir)
    sequences = make_sequences(4)
    with_behavior(learner, sequences)
    learner.save_state(tmp_path / "state")
    learner.step(sequences)
    before, counters = weights(learner), learner.counters
    spoil(tmp_path / "state")  # type: ignore[operator]
    with pytest.raises(InvalidState, match=reason):
        learner.load_state(tmp_path / "state")
    assert largest_difference(before, weights(learner)) == 0
    assert learner.counters == counters


def test_a_state_of_other_shapes_is_refused(model_dir: Path, tmp_path: Path) -> None:
    make_learner(model_dir, lora=LoraConfig(rank=2)).save_state(tmp_path / "state")
    with pytest.raises(InvalidState, match="does not fit"):
        make_learner(model_dir, lora=LoraConfig(rank=3)).load_state(tmp_path / "state")


def test_weights_are_loaded_without_the_moments(model_dir: Path, tmp_path: Path) -> None:
    """Even where these are kept in a form that the learner cannot hold."""
    first, second = (
        make_learner(model_dir, optimizer=OptimizerConfig(lr=1e-2, moments=kept)) for kept in ("8bit", "float32")
    )
    sequences = make_sequences(4)
    with_behavior(first, sequences)
    first.step(sequences)
    first.save_state(tmp_path / "state")
    with pytest.raises(InvalidState, match="moments"):
        second.load_state(tmp_path / "state")
    second.load_weights(tmp_path / "state")
    assert largest_difference(weights(first), weights(second)) == 0
    assert {name.split("/")[0] for name in read_state(tmp_path / "state", 0, 1, is_parameter)[1]} == {"parameter"}
    flip_a_byte(tmp_path / "state")
    with pytest.raises(InvalidState, match="not what its manifest says"):
        second.load_weights(tmp_path / "state")


def test_additions_of_another_scale_are_refused(model_dir: Path, tmp_path: Path) -> None:
    make_learner(model_dir, lora=LoraConfig(rank=2, alpha=8.0)).save_state(tmp_path / "state")
    make_learner(model_dir, lora=LoraConfig(rank=2, alpha=8.0)).load_state(tmp_path / "state")
    with pytest.raises(InvalidState, match=r"lora\.alpha 8\.0, not 4\.0"):
        make_learner(model_dir, lora=LoraConfig(rank=2, alpha=4.0)).load_state(tmp_path / "state")


def test_a_state_is_written_once(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir)
    learner.save_state(tmp_path / "state")
    with pytest.raises(InvalidState, match="written once"):
        learner.save_state(tmp_path / "state")
