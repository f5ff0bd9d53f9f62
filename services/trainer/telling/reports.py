"""A run's reports: metrics, events, and the files that people and other programs read.

Rule: write to the store first, because it fences; so a file may lack the last step of a trainer that died, but never
holds a step of a trainer that had already lost its job. Other listeners (TensorBoard, Weights & Biases) never cost a
step: an error in one is logged, and that listener gets nothing more.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gspo_core.objective import Alarm
from gspo_core.position import Position
from gspo_core.versions import StepReport, WeightsManifest
from services.files.disk_space import NoRoom, raising_no_room
from services.files.durable import append_line
from services.files.job_dir import JobDir
from services.files.job_records import JobRecords, reported_steps
from services.process.telemetry import get_logger
from services.state.store import Claim, Store
from services.trainer.telling.alarms import ADVICE, Alarms, RunAlarm
from services.trainer.telling.event_file import EventFile


class Listener(Protocol):
    """Receives every number."""

    def add(self, step: int, scalars: Mapping[str, float]) -> None: ...


class Reports:
    """The reports of one claimed job, in Redis and in the files of its directory."""

    def __init__(self, store: Store, claim: Claim, job_dir: JobDir, listeners: Sequence[Listener] = ()) -> None:
        self._store = store
        self._claim = claim
        self._metrics_path = job_dir.metrics
        self._records = JobRecords(job_dir)
        files = EventFile(job_dir.tensorboard, f"epoch{claim.epoch:06d}")
        self._listeners: list[Listener] = [files, *listeners]
        self._alarms = Alarms()
        self._has_recalled = False

    async def step(self, report: StepReport, of_the_loss: Sequence[Alarm]) -> None:
        await self._recall()
        await self._tell_store(report)
        await self._tell_files(report)
        get_logger().info("step", step=report.step, reward=report.metrics.get("reward/mean"))
        await self._raise(report.step, self._alarms.due(report.step, report.metrics, of_the_loss))

    async def missed(self, reports: Sequence[StepReport]) -> None:
        """Report those of these steps whose trainer died, or was ended, before it had; nothing comes twice."""
        job = self._claim.job_id
        in_file = await asyncio.to_thread(lambda: reported_steps(self._records.metrics()))
        in_store = {row["step"] for row in await self._store.metrics.read(job, reports[0].step)}
        last = await self._store.metrics.reported(job)
        for report in reports:
            at = Position(report.epoch, report.step)
            # A trainer of an earlier release reports without a mark.
            was_told = (last is not None and at <= last) or (at in in_file and at.step in in_store)
            if at not in in_file and not was_told:
                await self.step(report, ())
            elif at not in in_file or not was_told:
                await self._tell_store(report)
                if at not in in_file:
                    await self._tell_files(report)

    async def _tell_store(self, report: StepReport) -> None:
        """Only what it does not know yet; raises Fenced in any case."""
        at = Position(report.epoch, report.step)
        job, token = self._claim.job_id, self._claim.token
        await self._store.metrics.report(job, at, report.metrics, _record(report), token=token)

    async def _tell_files(self, report: StepReport) -> None:
        await asyncio.to_thread(self._write_files, report.step, report.metrics, _record(report))

    async def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        await self._recall()
        await self._write(step, metrics, {"step": step, "epoch": self._claim.epoch, **metrics})
        await self._raise(step, self._alarms.evaluated(step, metrics))

    async def _recall(self) -> None:
        if not self._has_recalled:
            self._alarms.recall(await self._store.metrics.read(self._claim.job_id))
            self._has_recalled = True

    async def _raise(self, step: int, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            numbers = {"metric": alarm.metric, "value": alarm.value, "bound": alarm.bound}
            await self._alert(step, alarm.kind, str(alarm), numbers)

    async def stands_still(self, step: int, message: str) -> None:
        await self._alert(step, RunAlarm.NO_PROGRESS, message, {})

    async def _alert(self, step: int, kind: Any, message: str, numbers: Mapping[str, Any]) -> None:
        data = {"step": step, "kind": str(kind), "message": message, "advice": ADVICE[kind], **numbers}
        await self._tell("alert", data)
        get_logger().warning("alert", **data)

    async def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        await self._store.events.add(self._claim.job_id, kind, data, token=self._claim.token)

    async def _write(self, step: int, metrics: Mapping[str, float], record: Mapping[str, Any]) -> None:
        await self._store.metrics.add(self._claim.job_id, step, metrics, token=self._claim.token)
        await asyncio.to_thread(self._write_files, step, metrics, record)

    def _write_files(self, step: int, metrics: Mapping[str, float], record: Mapping[str, Any]) -> None:
        append_line(self._metrics_path, msgspec.json.encode(record))
        for listener in list(self._listeners):
            try:
                with raising_no_room():
                    listener.add(step, metrics)
            except NoRoom as error:  # temporary
                get_logger().warning(
                    "listener missed a step", listener=type(listener).__name__, step=step, error=str(error)
                )
            except Exception as error:
                get_logger().error("failing listener removed", listener=type(listener).__name__, error=str(error))
                self._listeners.remove(listener)


def _record(report: StepReport) -> dict[str, Any]:
    return {"step": report.step, "version": report.version, "epoch": report.epoch, **report.metrics}


def disk_metrics(directory: Path, manifest: WeightsManifest) -> dict[str, float]:
    """Metrics of the volume that holds the job."""
    usage = shutil.disk_usage(directory)
    return {
        "disk/free_bytes": float(usage.free),
        "disk/total_bytes": float(usage.total),
        "disk/version_bytes": float(sum(file.size_bytes for file in manifest.files)),
    }
