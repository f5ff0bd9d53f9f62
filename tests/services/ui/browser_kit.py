"""A real browser on the pages of the API, and what every test of them asks of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = os.environ.get("GSPO_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = (
    "the Python package playwright is not installed: make test-browser"
    if importlib.util.find_spec("playwright") is None
    else "chromium is not installed: apt-get install chromium, or name one in GSPO_TEST_CHROMIUM"
    if CHROMIUM is None
    else ""
)
DEADLINE_MS = 30_000


class Visit:
    """One page of a browser. ``complaints``: what the browser found wrong; no test may leave any."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", self._see)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _see(self, request: Any) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc and not request.url.startswith("data:"):
            self.complaints.append(f"asks another host: {request.url}")

    async def open(self, place: str) -> None:
        await self.page.goto(f"{self.url}/ui/{place}")
        await self.page.wait_for_selector("main h1, main .empty", timeout=DEADLINE_MS)

    async def see(self, selector: str, text: str | None = None) -> Any:
        """The first such element, once it is there."""
        found = self.page.locator(selector) if text is None else self.page.locator(selector, has_text=text)
        await found.first.wait_for(timeout=DEADLINE_MS)
        return found.first

    async def stays_as_wide_as_the_screen(self) -> bool:
        widths = "[document.documentElement.scrollWidth, window.innerWidth]"
        content, screen = await self.page.evaluate(widths)
        return bool(content <= screen)

    async def text(self, selector: str) -> str:
        return str(await (await self.see(selector)).inner_text())


@contextlib.asynccontextmanager
async def visiting(url: str, *, width: int = 1280, scheme: str = "light") -> AsyncIterator[Visit]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            yield Visit(await context.new_page(), url)
        finally:
            await browser.close()
