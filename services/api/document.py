"""The OpenAPI document: what every route has in common is added here, once.

Rule: what is said here of every POST is brought about by `services.api.repeats`, for all of them alike.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Chosen by the caller: the same request under the same key is done once and answered alike.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\x21-\x7e]+$"},
}
CONFLICT = {
    "description": "Conflict",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}},
}


class Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            for operations in super().openapi()["paths"].values():
                if "post" in operations:
                    _describe_repeats(operations["post"])
        assert self.openapi_schema is not None
        return self.openapi_schema


def _describe_repeats(operation: dict[str, Any]) -> None:
    named = {one["name"].lower() for one in operation.get("parameters", ())}
    if "idempotency-key" not in named:
        operation.setdefault("parameters", []).append(KEY_PARAMETER)
    operation["responses"].setdefault("409", CONFLICT)
