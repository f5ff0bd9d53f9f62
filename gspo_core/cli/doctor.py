"""``gspo doctor``: what is missing or wrong on this machine, each finding with what to do about it. Changes nothing.

Here is what concerns every user; what only the service needs is examined by checks that the service registers.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from gspo_core.cli import service
from gspo_core.cli.connection import with_scheme
from gspo_core.cli.finding import Finding, Verdict
from gspo_core.cli.terminal import plain
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    import httpx

MIN_PYTHON = (3, 11)


def doctor(url: str) -> int:
    marks = {Verdict.OK: "✓", Verdict.NOTE: "·", Verdict.PROBLEM: "✗"}
    problems = 0
    for finding in examine(url):
        problems += finding.verdict is Verdict.PROBLEM
        print(f"{marks[finding.verdict]} {finding.subject:<12} {finding.text}", flush=True)
    print("\nno problems found" if not problems else f"\n{problems} problem(s) to fix, marked ✗")
    return 1 if problems else 0


def examine(url: str) -> Iterator[Finding]:
    yield _python()
    checks = service.checks()
    if checks is None:
        yield _no_service()
    for check in checks or ():
        yield check()
    yield _api(with_scheme(url).rstrip("/"))


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return Finding(Verdict.PROBLEM, "python", f"{version}; 3.11 or newer is needed")
    return Finding(Verdict.OK, "python", version)


def _no_service() -> Finding:
    text = f"not installed: this is only the client of an API elsewhere. {service.HOW_TO_INSTALL}"
    return Finding(Verdict.NOTE, "services", text)


def _api(url: str) -> Finding:
    import httpx

    try:
        answer = httpx.get(f"{url}/readyz", timeout=3.0, trust_env=False)
    except httpx.TransportError:
        return Finding(Verdict.NOTE, "api", f"nothing answers at {url}: start the stack with gspo up")
    except httpx.InvalidURL as error:
        return Finding(Verdict.PROBLEM, "api", f"{url} is no address: {error}")
    except httpx.RequestError as error:
        return Finding(Verdict.PROBLEM, "api", f"{url} answers, but it cannot be read: {error}")
    match _body(answer):
        case {"error": {"message": reason}} if answer.status_code != 200:
            return Finding(Verdict.PROBLEM, "api", f"{url} is not ready: {plain(str(reason))}")
        case {"degraded": [_, *_] as degraded} if answer.status_code == 200:
            return Finding(Verdict.NOTE, "api", f"{url} answers, but: {plain('; '.join(map(str, degraded)))}")
        case dict() if answer.status_code == 200:
            return Finding(Verdict.OK, "api", f"{url} is ready")
    return Finding(Verdict.PROBLEM, "api", f"{url} answers, but it is not a GSPO API (status {answer.status_code})")


def _body(answer: httpx.Response) -> JSON:
    try:
        return cast(JSON, answer.json())
    except (ValueError, RecursionError):
        return None
