"""How every command reaches the API: the address, the key, and failures that read as sentences."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gspo_core.cli.command import CommandError
from gspo_core.client import ApiError, Client, ClientError, Unreachable


def with_scheme(url: str) -> str:
    """Many write HOST:PORT."""
    return url if "://" in url else f"http://{url}"


@contextmanager
def connected(url: str) -> Iterator[Client]:
    """A client whose failures read as sentences; the key, if the server wants one, comes from $GSPO_API_KEY."""
    url = with_scheme(url)
    try:
        with Client(url, api_key=os.environ.get("GSPO_API_KEY")) as client:
            yield client
    except Unreachable as error:
        raise CommandError(
            f"no API answers at {url}. Start the stack with `gspo up` (on a cluster `kubectl port-forward`, which ends "
            "with its pod), or name another address with --url or $GSPO_URL."
        ) from error
    except ApiError as error:
        where = f" ({error.param})" if error.param else ""
        raise CommandError(f"{error.message}{where} [{error.code}]") from error
    except ClientError as error:
        raise CommandError(f"{error} ($GSPO_API_KEY)") from error
