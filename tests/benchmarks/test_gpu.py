"""`make gpu-check` without a GPU: it says that nothing ran, each part passes at toy size, what is wrong is found."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import check as checks
from benchmarks.gpu import memory, models, right, runner, sending, several, speed, system
from benchmarks.gpu import rate as rates
from benchmarks.gpu.__main__ import main, table
from benchmarks.gpu.check import Check, Differs, NotHere, Place, Result, largest, run_checks, status_of
from benchmarks.gpu.parts import PARTS, Part
from gspo_core.learner import attention as learner_attention
from gspo_core.learner import training
from gspo_core.plan import read_shape, shape_of
from services.engines import weight_buckets
from services.launch import stack as stack_of_a_user
from tests.apparatus.warm_python import WarmPython
from tests.core.learner_support import largest_difference

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm_children")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(1, tmp_path, tmp_path, tmp_path, "cpu", is_toy=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it would run")
def test_without_a_gpu_it_says_that_nothing_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 77
    said = capsys.readouterr().out
    assert "no GPU" in said
    assert f"0 of {len(PARTS)} parts ran" in said


def test_a_part_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="no part wrong: there are right, system, killed, group, memory"):
        main(["--parts", "wrong,right"])


CHECKS = [
    (part.name, check)
    for part in PARTS
    for check in part.checks
    if part.name not in ("several", "system", "killed", "group")
]


@pytest.mark.parametrize(("part", "check"), CHECKS, ids=[f"{part}-{check.name}" for part, check in CHECKS])
def test_a_check_passes_on_a_cpu_at_toy_size(part: str, check: Check, place: Place) -> None:
    (result,) = run_checks([check], place)
    expected = "did not run" if check.name == "beside TRL" else "passed"
    assert result.became == expected, result.said
    assert result.said


@pytest.fixture
def warm_stack(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stack_of_a_user, system):
        monkeypatch.setattr(module, "sys", SimpleNamespace(executable=str(warm_python.path)))


@pytest.mark.usefixtures("warm_stack")
def test_the_whole_service_passes_at_toy_size(place: Place) -> None:
    with system.serving(place) as serving:
        results = list(run_checks([*system.CHECKS, *system.KILLED_CHECKS, *system.GROUP_CHECKS], serving))
    assert [one.became for one in results] == ["passed"] * 3, "\n".join(map(str, results))


def test_weights_that_come_wrong_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right_ones = weight_buckets.buckets_in

    def wrong(directory: Path, max_bytes: int) -> list[weight_buckets.WeightBucket]:
        buckets = right_ones(directory, max_bytes)
        buckets[0].data.zero_()
        return buckets

    monkeypatch.setattr(sending, "buckets_in", wrong)
    with pytest.raises(Differs, match="log-probs"):
        sending.sending(Place(2, tmp_path, tmp_path, tmp_path, "cpu"))


def test_a_wrong_kernel_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores the window, where values are half precision."""
    right_one = learner_attention._by_pieces

    def wrong(query: torch.Tensor, *others: Any) -> list[torch.Tensor]:
        *kept, window = others
        return right_one(query, *kept, None if query.dtype == torch.bfloat16 else window)

    monkeypatch.setattr(learner_attention, "_by_pieces", wrong)
    with pytest.raises(Differs, match="apart"):
        right.attention(place)


@pytest.mark.parametrize("loss", right.LOSSES)
def test_a_loss_that_is_a_hundredth_off_is_found(place: Place, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    right_one = training.policy_loss

    def wrong(config: Any, logprobs: torch.Tensor, *others: Any, **named: Any) -> Any:
        found, stats = right_one(config, logprobs, *others, **named)
        return found * (1.01 if config.loss == loss else 1.0), stats

    monkeypatch.setattr(training, "policy_loss", wrong)
    monkeypatch.setattr(right, "LOSSES", (loss,))
    with pytest.raises(Differs, match=rf"{loss}, packed: the step"):
        right.losses("dense", "float32").run(place)


def test_what_is_no_number_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `max` passes NaN over."""
    assert [math.isnan(largest(given)) for given in ([0.1, math.nan], [math.nan, 0.1], [0.1, 0.2])] == [
        True,
        True,
        False,
    ]
    right_one = learner_attention._by_pieces
    monkeypatch.setattr(learner_attention, "_by_pieces", lambda *given: [one * math.nan for one in right_one(*given)])
    with pytest.raises(Differs, match="nan apart"):
        right.attention(place)
    weights = {"a": torch.zeros(2), "b": torch.tensor([0.0, math.nan])}
    assert math.isnan(largest_difference({"a": torch.zeros(2), "b": torch.zeros(2)}, weights))


def test_the_command_needs_no_pytest() -> None:
    """A machine with a GPU may have none."""
    program = "import sys; sys.modules['pytest'] = None; import benchmarks.gpu.__main__"
    tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr


def test_moments_that_are_lost_are_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    right_one = training.state.restore_tensors

    def wrong(model: Any, optimizer: Any, *others: Any) -> None:
        right_one(model, optimizer, *others)
        optimizer.state.clear()

    monkeypatch.setattr(training.state, "restore_tensors", wrong)
    with pytest.raises(Differs, match="next step"):
        right.resuming(place)


def test_ranks_are_checked_against_one(tmp_path: Path) -> None:
    place = Place(2, tmp_path, tmp_path, tmp_path, "cpu", is_toy=True)
    assert "float32" in several.arranged(2, context_parallel=2)(place)
    assert (tmp_path / "2-context_parallel2" / "weights").is_dir()
    with pytest.raises(Differs, match="does not divide"):
        several.arranged(2, context_parallel=3)(place)


def test_another_update_than_the_plain_loops_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    right_one = training.policy_loss
    monkeypatch.setattr(training, "policy_loss", lambda *given, **named: _doubled(*right_one(*given, **named)))
    with pytest.raises(Differs, match="do not compute the same"):
        speed.CHECKS[0].run(place)


def _doubled(loss: torch.Tensor, stats: Any) -> Any:
    return 2 * loss, stats


def test_a_plan_that_is_wrong_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that says what it held, as a CPU cannot."""
    planned: list[int] = []
    right_one = memory.plan_of

    def plan_of(*given: Any) -> Any:
        choice = right_one(*given)
        planned.append(choice.peak.device_total)
        return choice

    monkeypatch.setattr(memory, "plan_of", plan_of)
    for factor, is_right in ((1.05, True), (1.2, False), (0.8, False)):
        monkeypatch.setattr(memory, "held_at_most", lambda _, factor=factor: int(planned[-1] * factor))
        (result,) = run_checks(memory.CHECKS[:1], place)
        assert (result.became == "passed") is is_right, result.said
    assert "from the plan" in result.said


def test_a_written_model_has_the_shape_that_was_asked_for(place: Place) -> None:
    directory = models.model_at(place, "Qwen3-1.7B")
    shape = read_shape(directory)
    wanted = shape_of(models.shape_of_model("Qwen3-1.7B", is_toy=True))
    assert shape == wanted
    assert models.model_at(place, "Qwen3-1.7B") == directory
    lengths = {one.num_tokens for one in models.sequences_of(9, 40, shape.vocabulary)}
    assert lengths == {40}


def test_what_did_not_run_is_named_and_what_failed_decides(tmp_path: Path) -> None:
    def fails(_: Place) -> str:
        raise Differs("wrong")

    def breaks(_: Place) -> str:
        raise RuntimeError("out of memory")

    def is_elsewhere(_: Place) -> str:
        raise NotHere("elsewhere")

    checks = [Check("a", lambda _: "fine"), Check("b", fails), Check("c", breaks), Check("d", is_elsewhere)]
    results = list(run_checks([*checks, Check("e", fails, 4)], Place(1, tmp_path, tmp_path, tmp_path, "cpu")))
    assert [one.became for one in results] == ["passed", "failed", "failed", "did not run", "did not run"]
    assert "it needs 4 GPUs, and there are 1" in str(results[4])
    assert "out of memory" in results[2].said
    assert (status_of(results), status_of(results[:1]), status_of(results[3:]), status_of([])) == (1, 0, 77, 77)


PART = """
import json, os, sys, time
from dataclasses import asdict
from benchmarks.gpu.check import Result
name, place, results, *checks = sys.argv[1:]
if name == "--prepare":
    for one in checks:
        if one == "unready":
            sys.exit(3)
        with open(results, "a") as file:
            file.write(one + "\\n")
    sys.exit(0)
with open(results, "a") as file:
    for check in checks[: 9 if name == "passes" or "b" not in checks else 1]:
        file.write(json.dumps(asdict(Result(check, "passed", "fine", 0.5))) + "\\n")
    file.write('{"name": "torn')
print(os.getpid(), flush=True)
if name == "hangs":
    time.sleep(600)
sys.exit(7 if name == "dies" else 0)
"""


def played(part: Part, place: Place, out: Path, given: dict[str, Any], *, again: bool = False) -> runner.Ran:
    (ran,) = runner.run_parts([part], place, out, given, runner.How(again))
    return ran


@pytest.mark.parametrize(("name", "why"), [("hangs", "2 s were over"), ("dies", "ended with 7")])
def test_what_takes_a_part_along_is_told_and_what_it_had_found_is_kept(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.setattr(runner, "command_of", lambda *words: [sys.executable, "-c", PART, *words])
    part = Part(name, "", (Check("a", _fine), Check("b", _fine), Check("c", _fine)), limit_s=2.0)
    ran = played(part, place, tmp_path, {"code": "x"})
    assert [(one.name, one.became) for one in ran.results] == [("a", "passed"), ("b", "failed"), ("c", "did not run")]
    assert why in ran.results[1].said
    assert "b took the part along" in ran.results[2].said
    assert "| did not run |" in table([ran])[-1]
    gone_on = played(part, place, tmp_path, {"code": "x"})
    became = [(one.name, one.became) for one in gone_on.results]
    assert became == [("a", "passed"), ("b", "passed"), ("c", "failed")]
    assert gone_on.kept == {"a"}


def test_a_process_that_dies_after_its_last_check_has_failed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "command_of", lambda *words: [sys.executable, "-c", PART, *words])
    part = Part("dies", "", (Check("a", _fine),))
    for _ in range(2):  # not even the second time is it taken for good
        ran = played(part, place, tmp_path, {})
        assert [(one.name, one.became) for one in ran.results] == [("a", "passed"), ("its end", "failed")]
        assert status_of(ran.results) == 1


def test_a_part_whose_needs_cannot_be_made_is_told_and_others_run(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "command_of", lambda *words: [sys.executable, "-c", PART, *words])
    parts = [Part(name, "", (Check("a", _fine),), prepare=lambda _: None) for name in ("passes", "unready")]
    ran = list(runner.run_parts(parts, place, tmp_path, {}, runner.How()))
    assert [one.results[0].became for one in ran] == ["passed", "failed"]
    assert "could not be made (status 3)" in ran[1].results[0].said


def test_what_passed_is_not_run_again_unless_something_changed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "command_of", lambda *words: [sys.executable, "-c", PART, *words])
    part = Part("passes", "", (Check("a", _fine), Check("b", _fine)))

    def kept(code: str, part: Part = part, *, again: bool = False) -> set[str]:
        return set(played(part, place, tmp_path, {"code": code}, again=again).kept)

    both = {"a", "b"}
    assert [kept("x"), kept("x"), kept("x", again=True), kept("y"), kept("y")] == [set(), both, set(), set(), both]
    more = dataclasses.replace(part, checks=(*part.checks, Check("c", _fine)))
    assert [kept("y", more), kept("y", more)] == [both, {*both, "c"}]
    record = tmp_path / "passes.json"
    assert json.loads(record.read_text())["results"][0]["said"] == "fine"
    for torn in (record.read_text()[:40], "[]", "{}"):
        record.write_text(torn)
        assert kept("y", more) == set()


def test_what_a_run_had_found_that_was_ended_from_outside_is_kept(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "command_of", lambda *words: [sys.executable, "-c", PART, *words])
    part = Part("passes", "", (Check("a", _fine), Check("b", _fine)))
    found = json.dumps(dataclasses.asdict(Result("a", "passed", "before", 0.5)))
    for given, kept in (({"code": "y"}, set()), ({"code": "x"}, {"a"})):
        (tmp_path / "passes.jsonl").write_text(f'{json.dumps({"code": "x"})}\n{found}\n{{"name": "b", "bec')
        assert played(part, place, tmp_path, given).kept == kept
        (tmp_path / "passes.json").unlink()
    (tmp_path / "passes.jsonl").write_text("")
    assert played(part, place, tmp_path, {"code": "x"}).kept == set()


def test_what_cannot_begin_in_time_did_not_run(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "command_of", lambda *words: [sys.executable, "-c", PART, *words])
    parts = [Part(name, "", (Check("a", _fine),)) for name in ("passes", "late")]
    how = runner.How(within_s=runner.LEAST_S - 1)
    ran = list(runner.run_parts(parts, place, tmp_path, {}, how))
    assert [str(one.results[0]) for one in ran] == ["did not run  a: there was no time left for it"] * 2


def test_logs_of_what_failed_are_kept(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "command_of", lambda *words: [sys.executable, "-c", PART, *words])
    scratch = tmp_path / "scratch"
    (scratch / "service" / "logs").mkdir(parents=True)
    (scratch / "service" / "logs" / "trainer.log").write_text("out of memory")
    played(Part("dies", "", (Check("a", _fine),)), dataclasses.replace(place, folder=scratch), tmp_path, {})
    assert (tmp_path / "dies.logs" / "service-logs-trainer.log").read_text() == "out of memory"


def test_a_device_that_answers_no_more_is_asked_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: Place) -> str:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(checks, "is_broken", lambda device: True)
    results = list(run_checks([Check("a", breaks), Check("b", breaks)], place))
    assert [one.became for one in results] == ["failed", "did not run"]
    assert "a left the device unusable" in results[1].said


def test_the_table_says_the_error_and_not_its_explanation() -> None:
    said = "Traceback\n  File\ntorch.AcceleratorError: CUDA error: device-side assert | here\nCompile with X\n"
    ran = runner.Ran(Part("p", "", ()), (Result("a", "failed", said),), 1.0)
    assert "| torch.AcceleratorError: CUDA error: device-side assert \\| here |" in table([ran])[-1]


def test_no_row_is_too_long_for_a_plain_loop_that_halves(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = models.model_at(place, "Qwen3-0.6B")
    batch = models.sequences_of(4, 64, read_shape(directory).vocabulary)
    right_norm, real, asked = speed.plain_update(directory, batch, place)(), torch.stack, list[int]()

    def stack(rows: list[torch.Tensor], *others: Any) -> torch.Tensor:
        if rows[0].dtype == torch.int64:
            asked.append(len(rows))
            if len(rows) > 2:
                raise torch.OutOfMemoryError("too much")
        return real(rows, *others)

    update = speed.plain_update(directory, batch, place)
    monkeypatch.setattr(torch, "stack", stack)
    assert update() == pytest.approx(right_norm, rel=1e-2)
    assert asked == [4, 2, 2]


def _fine(_: Place) -> str:
    return "fine"


def test_what_is_tried_has_a_digest_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gspo_core").mkdir()
    (tmp_path / "gspo_core" / "a.py").write_text("one")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    before = runner.code_digest()
    assert runner.code_digest() == before
    found = [before]
    for name in ("gspo_core/a.py", "environments/demo/a.yaml", "tests/core/learner_support.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("two")
        found.append(runner.code_digest())
    assert len(set(found)) == 4


def test_the_rate_is_that_of_real_updates(tmp_path: Path) -> None:
    """On the CPU, with a tiny model: the batch is the one that both sides read."""
    shape = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    rates.prepare(tmp_path, shape | heads, groups=2, length=40)
    batch = json.loads((tmp_path / "batch.json").read_text())
    assert len(batch["sequences"]) == 16
    found = rates.ours(tmp_path, "cpu")
    assert found["tokens_per_s"] > 0
    assert found["norm"] > 0
    assert shape_of(rates.QWEN3[rates.MODEL]).num_active() > 5e8
