"""Does the device wait for what is not its work: batches assembled, weights copied out, weights published?"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

from benchmarks.gpu.check import Check, Found, Place
from benchmarks.gpu.models import model_at, sequences_of
from benchmarks.gpu.sending import sent
from benchmarks.gpu.speed import TOKENS, TOY_LENGTH, our_learner, wait
from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner
from gspo_core.plan import read_shape

MODEL, LENGTH = "Qwen3-1.7B", 8192
NUM_STEPS = 3
BUCKET_BYTES = 2**29


def prepare(place: Place) -> None:
    _other(model_at(place, MODEL), place.models / f"{MODEL}-other")


def _begun(place: Place) -> tuple[Learner, list[TrainSequence]]:
    """A learner that has taken its first step, and what it takes steps on."""
    directory = model_at(place, MODEL)
    length = TOY_LENGTH if place.is_toy else LENGTH
    batch = sequences_of(4 if place.is_toy else TOKENS // length, length, read_shape(directory).vocabulary)
    learner = our_learner(directory, length, place)
    learner.step(batch)
    return learner, batch


def publishing(place: Place) -> Found:
    """Steps alone, and steps during which the weights of the one before are written, as a trainer does it."""
    learner, batch = _begun(place)

    def timed_step() -> float:
        wait(place)
        began = time.perf_counter()
        learner.step(batch)
        wait(place)
        return time.perf_counter() - began

    alone = sorted(timed_step() for _ in range(NUM_STEPS))[NUM_STEPS // 2]
    copying, writing, beside, num_bytes = [], [], [], 0
    for number in range(NUM_STEPS):
        began = time.perf_counter()
        copy = learner.copy_weights()
        wait(place)
        copying.append(time.perf_counter() - began)
        target = place.folder / f"published-{number}"
        target.mkdir()

        def write(copy=copy, target=target) -> None:  # type: ignore[no-untyped-def]
            began = time.perf_counter()
            copy.write(target)
            writing.append(time.perf_counter() - began)

        thread = threading.Thread(target=write)
        thread.start()
        beside.append(timed_step())
        thread.join()
        num_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        shutil.rmtree(target)
    learner.close()
    copied, wrote, slowed = (sorted(one)[NUM_STEPS // 2] for one in (copying, writing, beside))
    busy = alone / (slowed + copied)
    numbers = {
        "step_s": alone,
        "copy_s": copied,
        "write_s": wrote,
        "step_beside_s": slowed,
        "bytes_to_disk_per_s": num_bytes / wrote,
        "share of the step alone": busy,
    }
    return Found(
        f"a step {alone:.2f} s alone, {slowed:.2f} s while {num_bytes / 2**30:.2f} GiB are written "
        f"({num_bytes / wrote / 2**30:.2f} GiB/s), copied out in {copied:.2f} s: {busy:.0%} of the time is the step's",
        numbers,
    )


def assembling(place: Place) -> Found:
    """How long the device's next batch takes on the CPU, as a share of its step."""
    learner, batch = _begun(place)
    wait(place)
    began = time.perf_counter()
    learner._prepare(batch, range(len(batch)))
    wait(place)
    preparing = time.perf_counter() - began
    began = time.perf_counter()
    learner.step(batch)
    wait(place)
    step = time.perf_counter() - began
    learner.close()
    numbers = {"prepare_s": preparing, "step_s": step}
    return Found(f"{preparing * 1e3:.1f} ms of a step of {step:.2f} s: {preparing / step:.1%}", numbers)


def to_an_engine(place: Place) -> Found:
    """To a second process on the same device."""
    first = model_at(place, MODEL)
    second = _other(first, place.models / f"{MODEL}-other")
    return sent(first, second, place, engine=0, through="cpu", bucket_bytes=2**16 if place.is_toy else BUCKET_BYTES)


def _other(model: Path, target: Path) -> Path:
    """The same shape with other numbers."""
    from safetensors.torch import load_file, save_file

    if not target.exists():
        half = target.with_name(f".{target.name}.half")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(model, half)
        for path in half.glob("*.safetensors"):
            tensors = {name: one * 1.5 if one.ndim > 1 else one for name, one in load_file(path).items()}
            path.unlink()  # those that were read may still be mapped from it
            save_file(tensors, path, metadata={"format": "pt"})
        os.replace(half, target)
    return target


CHECKS = (
    Check("weights written beside a step", publishing),
    Check("batches assembled", assembling),
    Check("weights to an engine on the same device", to_an_engine),
)
