"""The OpenAPI document: everything that routes have in common is added here, once.

Rule: `services.api.http.repeats` does for all routes alike what this says about POST, and `services.api.http.access`
what it says about keys.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Chosen by the caller: a request repeated with the same key is done once and answered alike.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\x21-\x7e]+$"},
}
V1 = "/v1"
BEARER = {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
CONFLICT = {
    "description": "Conflict",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}},
}


class Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            document.setdefault("components", {})["securitySchemes"] = BEARER
            for path, operations in document["paths"].items():
                if path.startswith(V1):
                    for operation in operations.values():
                        operation["security"] = [{name: [] for name in BEARER}]
                if "post" in operations:
                    _describe_repeats(operations["post"])
        assert self.openapi_schema is not None
        return self.openapi_schema


def _describe_repeats(operation: dict[str, Any]) -> None:
    named = {one["name"].lower() for one in operation.get("parameters", ())}
    if "idempotency-key" not in named:
        operation.setdefault("parameters", []).append(KEY_PARAMETER)
    operation["responses"].setdefault("409", CONFLICT)
