"""The pages for browsers: static files that use this API like any other client.

One rule: the pages load nothing from other hosts and run no script but these files; headers make the browser enforce
it. The files are the same for everyone and hold no data.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, RedirectResponse, Response

from services.api.http.errors import RequestRefused

router = APIRouter(include_in_schema=False)

ROOT = Path(__file__).parents[1] / "ui"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Revalidated each time, mostly "not modified": files of two releases never mix.
    "Cache-Control": "no-cache",
}


@router.get("/")
@router.get("/ui")
async def ui() -> Response:
    return RedirectResponse("/ui/")


@router.get("/docs")
async def docs() -> Response:
    """The routes, shown by our own pages: the framework's load scripts from other hosts."""
    return RedirectResponse("/ui/#/api")


@router.get("/ui/{path:path}")
async def ui_file(path: str) -> Response:
    found = _FILES.get(path or "index.html")
    if found is None:
        raise RequestRefused(404, "page_not_found", "there is no such page; start at /ui/")
    return FileResponse(found, headers=HEADERS, media_type=TYPES[found.suffix])


# Listed when the process starts: no path from a caller ever reaches the file system.
_FILES = {str(file.relative_to(ROOT)): file for file in sorted(ROOT.rglob("*")) if file.is_file()}
