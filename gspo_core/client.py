"""A Python client of the REST API.

One rule: every call may be cut at any moment and is safe to go on with. Every POST carries a key of its own, so a
repeated one is done once; events resume after the last one seen. Answers are handed on as they come
(``gspo_core.api_answers``); the client keeps no state beside its connections.

Importing it is cheap: the HTTP library is loaded by the first client.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypedDict, TypeVar, Unpack, cast

from gspo_core.api_answers import (
    Drain,
    EnvironmentSource,
    EnvironmentValidation,
    EpisodeDetail,
    EpisodeSummary,
    Event,
    GroupSummary,
    Job,
    OutsideDescription,
    PastEvent,
    Plan,
    PublishedVersion,
    RegisteredEnvironment,
    SchemaAnswer,
    Settings,
    Taken,
    TaskList,
    Trial,
    Worker,
)
from gspo_core.client_checkpoints import CheckpointCalls
from gspo_core.client_errors import ClientError as ClientError
from gspo_core.client_errors import Unreachable as Unreachable
from gspo_core.client_forks import ForkCalls
from gspo_core.client_leases import LeaseCalls, RequestParts
from gspo_core.client_replays import ReplayCalls
from gspo_core.client_traffic import TrafficCalls
from gspo_core.idempotency_key import IN_WORDS, KEY
from gspo_core.json_value import JSON
from gspo_core.server_events import parse_events

if TYPE_CHECKING:
    import httpx

    from gspo_core.environment_records import EnvironmentDescription

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
# The service pings twice in this time; a connection that stays silent longer is dead without having said so.
STREAM_SILENCE_S = 40.0
# What a rollout worker is asked takes as long as an environment does.
EXAMINATION_S = 150.0
RETRIES = 4
# About half a minute: an API that restarts, or is replaced by another, is back by then.
STREAM_RETRIES = 8
FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 8.0
RETRIED = frozenset({429, 502, 503, 504})


T = TypeVar("T")


class FoundProblem(TypedDict):
    """One thing that is wrong with a request."""

    code: str
    message: str
    param: str | None


class _Data(TypedDict, Generic[T]):
    data: T


class _Configured(TypedDict):
    config: Settings


class _Described(TypedDict):
    description: OutsideDescription


class _PageOf(_Data[list[T]], Generic[T]):
    has_more: bool
    last_id: str


class _Metrics(TypedDict):
    data: list[dict[str, float]]
    has_more: bool


class ApiError(ClientError):
    """The API refused. `code` is for programs, `message` for people, `param` names what is to blame."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        request_id: str | None = None,
        errors: tuple[FoundProblem, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{message} [{code}]")
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.request_id = request_id
        self.errors = errors
        """Everything that is wrong, where it is more than one thing."""
        self.retry_after_s = retry_after_s


class Spec(Protocol):
    """A `JobSpec`, or anything else that dumps itself like one."""

    def model_dump(self, *, mode: str) -> Settings: ...


class Client(CheckpointCalls, ForkCalls, LeaseCalls, ReplayCalls, TrafficCalls):
    """Talks to one API. Use it as a context manager, or close it."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        import httpx

        self._httpx = httpx
        self._sleep = sleep
        headers = {"Authorization": f"Bearer {api_key.strip()}"} if api_key else {}
        try:
            # What stands in the environment about proxies is for the world outside, and would carry the key there.
            self._http = httpx.Client(
                base_url=base_url.rstrip("/"), headers=headers, timeout=timeout_s, transport=transport, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise Unreachable(f"{base_url} is not a valid address: {error}") from None
        except UnicodeEncodeError:
            raise ClientError("this is not an API key: it contains characters that no key has") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def create_job(self, spec: Spec | Mapping[str, JSON], *, idempotency_key: str | None = None) -> Job:
        """Submit a job. Calls with the same key make one job, whatever gets lost on the way."""
        key = idempotency_key or uuid.uuid4().hex
        if not KEY.fullmatch(key):
            raise ClientError(f"{key!r} cannot be sent: {IN_WORDS}")
        return self._ask(Job, "POST", "/v1/jobs", json=_plain(spec), headers={"Idempotency-Key": key})

    def plan_job(self, spec: Spec | Mapping[str, JSON], *, gpus: str | None = None) -> Plan:
        """Plan a job without creating it; with `gpus` (8xH100) also the learner's memory."""
        asked = {"dry_run": "true"} | ({} if gpus is None else {"gpus": gpus})
        return self._ask(Plan, "POST", "/v1/jobs", params=asked, json=_plain(spec), timeout=EXAMINATION_S)

    def job(self, job_id: str) -> Job:
        return self._ask(Job, "GET", _job_path(job_id))

    def jobs(self, *, status: str | None = None, parent: str | None = None, order: str = "desc") -> Iterator[Job]:
        """All jobs, newest first, fetched page by page as they are asked for. ``parent``: those made of its past."""
        params = {"limit": "100", "order": order}
        params |= {name: value for name, value in (("status", status), ("parent", parent)) if value}
        yield from self._pages(Job, "/v1/jobs", params)

    def config(self, job_id: str) -> Settings:
        """The specification of a job with every default spelled out."""
        return self._ask(_Configured, "GET", _job_path(job_id, "/config"))["config"]

    def pause(self, job_id: str) -> Job:
        """Ask a job to pause after the step that it is in."""
        return self._ask(Job, "POST", _job_path(job_id, "/pause"))

    def resume(
        self, job_id: str, *, from_step: int | None = None, steps: int | None = None, horizon: int | None = None
    ) -> Job:
        """Let a paused job go on; or one that is over, from where it ended or ``from_step``, for ``steps`` in all. The
        schedule of its learning rate ends where it did, or at ``horizon``."""
        given = {"from_step": from_step, "steps": steps, "horizon": horizon}
        params = {name: str(value) for name, value in given.items() if value is not None}
        return self._ask(Job, "POST", _job_path(job_id, "/resume"), params=params)

    def cancel(self, job_id: str, *, drain: bool = False, checkpoint: bool = False) -> Job:
        """Ask for the end of a job. ``drain`` trains what is under way first; ``checkpoint`` keeps where it ended."""
        params = {"mode": "drain" if drain else "now", "checkpoint": "true" if checkpoint else "false"}
        return self._ask(Job, "POST", _job_path(job_id, "/cancel"), params=params)

    def remove_job(self, job_id: str) -> None:
        """Remove a job that is over, with all that it has made. Gone already is as good."""
        self._remove(_job_path(job_id), "job_not_found")

    def change(self, job_id: str, changes: Mapping[str, JSON], *, if_match: str | None = None) -> Job:
        """Change settings of a job that runs: ``{"optimizer": {"lr": 5e-7}}``. They hold from its next step on. With
        ``if_match``, the ``ETag`` of the job as it was looked at, only if they have not changed since."""
        headers = {"If-Match": if_match} if if_match else {}
        return self._ask(Job, "PATCH", _job_path(job_id), json=dict(changes), headers=headers)

    def metrics(self, job_id: str, from_step: int = 0, *, names: str | None = None) -> list[dict[str, float]]:
        """One row for each step from `from_step` on: `step` and the metrics by name."""
        rows: list[dict[str, float]] = []
        more = True
        while more:
            params = {"from_step": str(from_step)} | ({"names": names} if names else {})
            answer = self._ask(_Metrics, "GET", _job_path(job_id, "/metrics"), params=params)
            rows += answer["data"]
            more = answer["has_more"]
            from_step = int(rows[-1]["step"]) + 1 if rows else from_step
        return rows

    def groups(self, job_id: str, **filters: str | int) -> Iterator[GroupSummary]:
        """Groups with their episodes, fetched as they are asked for: those that were trained, newest step first, or
        with ``status="open"`` those in the queue."""
        yield from self._pages(GroupSummary, _job_path(job_id, "/groups"), _texts(filters))

    def episodes(self, job_id: str, **filters: str | float) -> Iterator[EpisodeSummary]:
        """Episodes that were trained, newest step first: ``step``, ``stop_reason``, ``min_reward``, ``max_reward``,
        ``version``."""
        yield from self._pages(EpisodeSummary, _job_path(job_id, "/episodes"), _texts(filters))

    def episode(self, episode_id: str, *, tokens: bool = False) -> EpisodeDetail:
        """One episode turn by turn, by its id ``JOB/GROUP/MEMBER``, also while it runs."""
        params = {"include": "tokens"} if tokens else {}
        return self._ask(EpisodeDetail, "GET", f"/v1/episodes/{_path(episode_id)}", params=params)

    def push_trajectories(self, job_id: str, trajectories: Sequence[Mapping[str, JSON]]) -> list[Taken]:
        """Episodes, or pieces of them, that your own code has sampled: what became of each, ``accepted`` or the
        ``reason`` why not. Their shape is ``PushedTrajectory`` of the API's document."""
        body: dict[str, JSON] = {"trajectories": [dict(one) for one in trajectories]}
        return self._ask(_Data[list[Taken]], "POST", _job_path(job_id, "/trajectories"), json=body)["data"]

    def describe_environment(
        self, job_id: str, num_train: int, num_eval: int = 0, *, index: int = 0
    ) -> OutsideDescription:
        """Say how many tasks an environment of a job has that only your own code can play."""
        body: dict[str, JSON] = {"num_tasks": {"train": num_train, "eval": num_eval}}
        path = _job_path(job_id, f"/environments/{index}/description")
        return self._ask(_Described, "POST", path, json=body)["description"]

    def versions(self, job_id: str) -> Iterator[PublishedVersion]:
        """The published versions of a job's weights, newest first."""
        yield from self._pages(PublishedVersion, _job_path(job_id, "/versions"), {"limit": "100"})

    def export_episodes(
        self, job_id: str, from_step: int = 0, to_step: int | None = None, *, tokens: bool = False
    ) -> Iterator[EpisodeDetail]:
        """Every trained episode turn by turn, the oldest step first. A connection that breaks ends it with Unreachable:
        go on with the step of the last one."""
        given = {"from_step": from_step, "to_step": to_step, "include": "tokens" if tokens else None}
        params = {name: str(value) for name, value in given.items() if value is not None}
        with self._download(_job_path(job_id, "/episodes.jsonl"), params) as answer:
            for line in _lines(answer.iter_bytes()):
                yield json.loads(line)

    def register_environment(
        self, name: str, source: EnvironmentSource, *, agent: Mapping[str, JSON] | None = None
    ) -> RegisteredEnvironment:
        """A version with this content; the same content is the same version. ``agent``: as a job has it."""
        body = {"name": name, "source": cast(JSON, source)} | ({} if agent is None else {"agent": dict(agent)})
        return self._ask(RegisteredEnvironment, "POST", "/v1/environments", json=body)

    def upload_environment(
        self, name: str, ref: str, content: bytes, *, kind: str, agent: Mapping[str, JSON] | None = None
    ) -> RegisteredEnvironment:
        """``kind``: ``text/x-python`` for a file, ``application/zip``, ``application/gzip`` or ``application/x-tar``
        for a package. ``ref`` is ``file.py:Class`` or ``package.module:Class`` in it. ``agent``: as a job has it; a
        program runs in the folder of that file."""
        return self._ask(
            RegisteredEnvironment,
            "POST",
            "/v1/environments/uploads",
            params={"name": name, "ref": ref} | ({} if agent is None else {"agent": json.dumps(dict(agent))}),
            content=content,
            headers={"Content-Type": kind},
        )

    def upload_folder(
        self, name: str, ref: str, folder: str | Path, *, agent: Mapping[str, JSON] | None = None
    ) -> RegisteredEnvironment:
        """A folder as a package: the same files are the same version. ``ref`` is ``package.module:Class`` or
        ``file.py:Class`` in it. Raises FolderRefused."""
        from gspo_core.packed_folder import pack_folder

        return self.upload_environment(name, ref, pack_folder(Path(folder)), kind="application/zip", agent=agent)

    def environments(self, *, name: str | None = None) -> Iterator[RegisteredEnvironment]:
        """Registered versions by name."""
        params = {"limit": "100"} | ({"name": name} if name else {})
        yield from self._pages(RegisteredEnvironment, "/v1/environments", params)

    def environment(self, reference: str) -> RegisteredEnvironment:
        """`name@version`, or the newest version of a `name`."""
        return self._ask(RegisteredEnvironment, "GET", _environment_path(reference))

    def remove_environment(self, reference: str) -> None:
        """Gone already is as good."""
        self._remove(_environment_path(reference), "environment_not_found")

    def validate_environment(self, reference: str) -> EnvironmentValidation:
        """Have a rollout worker examine it. It takes a while."""
        path = _environment_path(reference, "/validate")
        return self._ask(EnvironmentValidation, "POST", path, timeout=EXAMINATION_S)

    def try_environment(
        self,
        reference: str,
        turns: Sequence[Mapping[str, JSON]] | None = None,
        *,
        task: int = 0,
        split: str = "train",
        seed: int = 0,
    ) -> Trial:
        """One episode with these turns (``text``, ``calls``), or with those of its oracle."""
        body: dict[str, JSON] = {"split": split, "task": task, "seed": seed}
        body["turns"] = None if turns is None else [dict(t) for t in turns]
        return self._ask(Trial, "POST", _environment_path(reference, "/try"), json=body, timeout=EXAMINATION_S)

    def environment_tasks(
        self, reference: str, first: int = 0, count: int = 20, *, split: str = "train"
    ) -> list[dict[str, JSON]]:
        params = {"split": split, "first": str(first), "limit": str(count)}
        path = _environment_path(reference, "/tasks")
        return self._ask(TaskList, "GET", path, params=params, timeout=EXAMINATION_S)["tasks"]

    def environment_schema(self, reference: str) -> EnvironmentDescription:
        """Its tools and limits, as a policy sees them."""
        path = _environment_path(reference, "/schema")
        return self._ask(SchemaAnswer, "GET", path, timeout=EXAMINATION_S)["description"]

    def workers(self) -> list[Worker]:
        """The processes that are registered."""
        return list(self._pages(Worker, "/v1/workers", {"limit": "1000"}))

    def drain_worker(self, worker_id: str) -> Drain:
        """Ask a rollout worker or a trainer to leave: it hands back what it holds, and ends."""
        return self._ask(Drain, "POST", f"/v1/workers/{_path(worker_id)}/drain")

    def drain_engine(self, engine_id: str, *, undo: bool = False) -> Drain:
        """Leave an engine alone, by its address: no new requests, no new weights. ``state`` is ``drained`` when it may
        be stopped; ``undo`` uses it again."""
        return self._ask(Drain, "DELETE" if undo else "POST", f"/v1/engines/{_path(engine_id)}/drain")

    def events(
        self, job_id: str, after: str | None = "0", *, on_wait: Callable[[int], None] = lambda failures: None
    ) -> Iterator[Event]:
        """Events after `after`, until the job is over: those that are kept, then live. None: from now on.

        A connection that breaks is opened again after the last event that came through: none is missing, none comes
        twice. Raises Unreachable when that fails many times in a row, or when there is no API to begin with, and
        ApiError when the API goes on saying that it cannot answer now.
        ``on_wait`` is told when a connection was lost, with how often in a row it has failed.
        """
        failures, was_connected = 0, False
        while True:
            try:
                for event in self._stream(job_id, after):
                    failures, was_connected = 0, True
                    if event is None:
                        continue
                    if event.type == "end":
                        return
                    after = event.id or after
                    yield event
                retry_after_s = None
            except self._httpx.TransportError as error:
                is_absent = isinstance(error, self._httpx.ConnectError) and not was_connected
                if is_absent or failures >= STREAM_RETRIES:
                    raise _unreachable(self._http, error) from error
                retry_after_s = None
            except ApiError as error:
                if error.status not in RETRIED or failures >= STREAM_RETRIES:
                    raise
                retry_after_s = error.retry_after_s
            on_wait(failures)
            self._sleep(_delay(failures, retry_after_s))
            failures += 1

    def past_events(self, job_id: str) -> Iterator[PastEvent]:
        """Events that are kept, the oldest first; ``events`` goes on with those to come."""
        yield from self._pages(PastEvent, _job_path(job_id, "/events"), {"limit": "1000"})

    def _stream(self, job_id: str, after: str | None) -> Iterator[Event | None]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after is not None else {})
        timeout = self._httpx.Timeout(self._http.timeout.connect, read=STREAM_SILENCE_S)
        with self._http.stream("GET", _job_path(job_id, "/events"), headers=headers, timeout=timeout) as answer:
            if answer.status_code != 200:
                answer.read()
                raise _api_error(answer)
            yield from parse_events(answer.iter_lines())

    @contextmanager
    def _download(
        self, path: str, params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """An answer that is read piece by piece, and that nobody asks for again where it breaks off."""
        try:
            with self._http.stream("GET", path, params=params, headers=headers) as answer:
                if not answer.is_success:
                    answer.read()
                    raise _api_error(answer)
                yield answer
        except self._httpx.TransportError as error:
            raise _unreachable(self._http, error) from error

    def _wait_before_another(self, attempt: int, error: ClientError) -> None:
        """Raises ``error`` where another attempt would not help."""
        if not isinstance(error, Unreachable) and not (isinstance(error, ApiError) and error.status in RETRIED):
            raise error
        self._sleep(_delay(attempt, error.retry_after_s if isinstance(error, ApiError) else None))

    def _remove(self, path: str, gone: str) -> None:
        try:
            self._ask(type(None), "DELETE", path)
        except ApiError as error:
            if error.code != gone:
                raise

    def _pages(self, item: type[T], path: str, params: dict[str, str]) -> Iterator[T]:
        while True:
            page = self._ask(_PageOf[T], "GET", path, params=params)
            yield from page["data"]
            if not page["has_more"]:
                return
            params = {**params, "after": page["last_id"]}

    def _ask(self, shape: type[T], method: str, path: str, **request: Unpack[RequestParts]) -> T:
        """One answer, taken to have ``shape``. A request that may not have arrived is repeated: all of ours are safe to
        repeat."""
        if method == "POST":
            request["headers"] = {"Idempotency-Key": uuid.uuid4().hex} | request.get("headers", {})
        for attempt in range(RETRIES + 1):
            is_last = attempt == RETRIES
            try:
                answer = self._http.request(method, path, **request)
            except self._httpx.TransportError as error:
                # Nothing listens: that does not change within a second, and a person waits for the message.
                is_absent = isinstance(error, self._httpx.ConnectError | self._httpx.UnsupportedProtocol)
                if is_last or is_absent:
                    raise _unreachable(self._http, error) from error
                wait_s = _delay(attempt)
            else:
                if answer.is_success:
                    return cast(T, _json(answer))
                # A conflict that is worth another try says when: our first request is still being done.
                is_under_way = answer.status_code == 409 and "retry-after" in answer.headers
                if is_last or not (is_under_way or answer.status_code in RETRIED):
                    raise _api_error(answer)
                wait_s = _delay(attempt, _retry_after_s(answer))
            self._sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Split at line feeds alone: other line separators belong to the text."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _json(answer: httpx.Response) -> JSON:
    try:
        return cast(JSON, answer.json()) if answer.content else None
    except ValueError:  # another service listens there
        raise _api_error(answer) from None


def _plain(spec: Spec | Mapping[str, JSON]) -> Settings:
    return dict(spec) if isinstance(spec, Mapping) else spec.model_dump(mode="json")


def _job_path(job_id: str, rest: str = "") -> str:
    from urllib.parse import quote

    return f"/v1/jobs/{quote(job_id, safe='')}{rest}"


def _path(episode_id: str) -> str:
    from urllib.parse import quote

    return quote(episode_id, safe="/")


def _environment_path(reference: str, rest: str = "") -> str:
    from urllib.parse import quote

    return f"/v1/environments/{quote(reference, safe='@')}{rest}"


def _texts(filters: Mapping[str, str | float]) -> dict[str, str]:
    return {"limit": "100"} | {name: str(value) for name, value in filters.items()}


def _delay(attempt: int, retry_after_s: float | None = None) -> float:
    """Doubled every time, beginning with what the API asks for."""
    first_s = FIRST_DELAY_S if retry_after_s is None else max(FIRST_DELAY_S, retry_after_s)
    return min(LONGEST_DELAY_S, first_s * 2.0**attempt)


def _retry_after_s(answer: httpx.Response) -> float | None:
    """The header in seconds; a date, which our API never sends, counts as none."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None


def _unreachable(http: httpx.Client, error: Exception) -> Unreachable:
    return Unreachable(f"no answer from {http.base_url}: {error or type(error).__name__}")


def _api_error(answer: httpx.Response) -> ApiError:
    try:
        error = answer.json()["error"]
        return ApiError(
            answer.status_code,
            error["code"],
            error["message"],
            param=error.get("param"),
            request_id=error.get("request_id"),
            errors=tuple(error.get("errors", ())),
            retry_after_s=_retry_after_s(answer),
        )
    except (ValueError, KeyError, TypeError):
        message = f"status {answer.status_code} without an explanation; is {answer.url} the API?"
        return ApiError(answer.status_code, "unknown", message, retry_after_s=_retry_after_s(answer))
