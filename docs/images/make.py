"""Makes the pictures of the viewer from a running service: ``python docs/images/make.py --url http://127.0.0.1:8000``.

It shows the newest job that has groups, and plays an episode of the registered environment ``calculator``, which it
registers where it is not. ``--only replay,family`` makes these alone, of a job that was forked, and replayed over HTTP
with `influence` and `single`. ``--all FOLDER`` shows every page at 1440 and 390 px, light and dark, and ends with 1
where the browser found anything wrong. Needs chromium and playwright (``make test-browser`` installs both).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent
DESKTOP = (1360, 900)
PHONE = (390, 844)
PAST = {"replay", "family"}
Shot = tuple[str, str, str, tuple[int, int]]
"""A picture's name, the page, the colours and the size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--job", help="the job to show (default: the newest that has groups)")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser's program")
    parser.add_argument("--only", default="", help="these pictures, separated by commas")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="every page, wide and narrow, light and dark")
    arguments = parser.parse_args()
    only = set(filter(None, arguments.only.split(",")))
    with httpx.Client(base_url=arguments.url) as api, sync_playwright() as playwright:
        job = arguments.job or _with_groups(api)
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        if arguments.all:
            raise SystemExit(_everything(browser, arguments.url, _places(api, job), arguments.all))
        for name, place, scheme, size in _past(api, job) if only & PAST else _pictures(api, job):
            if not only or name in only:
                _picture(browser, arguments.url, name, place, scheme, size)
        browser.close()


def _places(api: httpx.Client, job: str) -> dict[str, str]:
    """Every kind of page, by its name."""
    group = api.get(f"/v1/jobs/{job}/groups", params={"limit": 1}).json()["data"][0]["id"]
    parts = ("", "/groups", "/versions", "/replay", "/family", "/events", "/config")
    job_pages = {f"job{part.replace('/', '-')}": f"#/jobs/{job}{part}" for part in parts}
    others = {"jobs": "#/jobs", "group": f"#/groups/{group}", "episode": f"#/episodes/{group}/0"}
    return others | job_pages | {"environments": "#/environments", "workers": "#/workers"}


def _everything(browser: Browser, url: str, places: dict[str, str], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    complaints: list[str] = []
    for width, height in ((1440, 900), PHONE):
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            for name, place in places.items():
                page.goto(f"{url}/ui/{place}")
                page.wait_for_selector("main h1, main .empty")
                page.wait_for_timeout(800)
                if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
                    complaints.append(f"{name} is wider than {width} px")
                page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
            context.close()
    print("\n".join(complaints) or f"{len(places)} pages, four times each, in {folder}: no complaint")
    return bool(complaints)


def _past(api: httpx.Client, job: str) -> tuple[Shot, ...]:
    replays = api.get(f"/v1/jobs/{job}/replays").json()["data"]
    done = next(one for one in replays if one["status"] == "done" and one["influence"] and one["single"])
    return (
        ("replay", f"#/replays/{job}/{done['id'].rpartition('/')[2]}", "light", (1360, 690)),
        ("family", f"#/jobs/{job}/family", "light", (1360, 1000)),
    )


def _pictures(api: httpx.Client, job: str) -> tuple[Shot, ...]:
    group, member = _telling(api, job)
    environment = _environment(api)
    return (
        ("jobs", "#/jobs", "light", DESKTOP),
        ("job", f"#/jobs/{job}", "light", (1360, 1180)),
        ("job-dark", f"#/jobs/{job}", "dark", (1360, 1180)),
        ("group", f"#/groups/{_contrast(api, job)}", "light", DESKTOP),
        ("episode", f"#/episodes/{group}/{member}", "light", (1360, 1000)),
        ("episode-dark", f"#/episodes/{group}/{member}", "dark", (1360, 1000)),
        ("time", f"#/jobs/{job}", "light", (1360, 640)),
        ("environments", "#/environments", "light", (1360, 720)),
        ("environment", f"#/environments/{environment}", "light", (1360, 1190)),
        ("workers", "#/workers", "light", (1360, 700)),
        ("phone", f"#/jobs/{job}", "dark", PHONE),
        ("phone-workers", "#/workers", "dark", PHONE),
    )


def _with_groups(api: httpx.Client) -> str:
    """The newest job that there is something to see of."""
    for job in api.get("/v1/jobs", params={"order": "desc"}).json()["data"]:
        if api.get(f"/v1/jobs/{job['id']}/groups", params={"limit": 1}).json()["data"]:
            return str(job["id"])
    raise SystemExit("no job has groups yet: submit one and wait for its first step")


def _environment(api: httpx.Client) -> str:
    source = {"type": "reference", "ref": "environments.calculator:Calculator"}
    answer = api.post("/v1/environments", json={"name": "calculator", "source": source})
    return str(answer.raise_for_status().json()["id"])


def _telling(api: httpx.Client, job: str) -> tuple[str, int]:
    """Group and member: new weights came in the middle of a turn, and the task was solved all the same."""
    groups = api.get(f"/v1/jobs/{job}/groups", params={"limit": 100}).json()["data"]
    candidates = [(group, one) for group in groups for one in group["episodes"] if len(one["versions"]) > 1]
    group, episode = max(candidates, key=lambda found: _tells(api, *found))
    return str(group["id"]), int(episode["member"])


def _contrast(api: httpx.Client, job: str) -> str:
    """A group of which those that are seen first differ most."""

    def differs(group: dict[str, Any]) -> tuple[int, int]:
        seen = group["episodes"][:4]
        return len({one["reward"] for one in seen}), len({one["num_turns"] for one in seen})

    groups = api.get(f"/v1/jobs/{job}/groups", params={"limit": 100}).json()["data"]
    return str(max(groups, key=differs)["id"])


def _tells(api: httpx.Client, group: dict[str, Any], episode: dict[str, Any]) -> tuple[float, ...]:
    spread, reward = group["reward_std"] or 0.0, episode["reward"] or 0.0
    in_a_turn = 0
    if spread and reward:
        turns = api.get(f"/v1/episodes/{episode['id']}").json()["turns"]
        in_a_turn = len(turns[0]["versions"])
    return in_a_turn > 1, reward, spread > 0, episode["num_turns"], in_a_turn


def _picture(browser: Browser, url: str, name: str, place: str, scheme: str, size: tuple[int, int]) -> None:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=1,
    )
    page = context.new_page()
    page.goto(f"{url}/ui/{place}")
    page.wait_for_selector("main h1")
    page.wait_for_timeout(1500)
    if "episode" in name:
        _point_at_a_token(page)
    elif name == "time":
        page.locator('[data-split="Time of a step"]').wait_for()
        page.locator(".stack.wide .card").first.evaluate("one => one.scrollIntoView()")
        page.wait_for_timeout(300)
    elif name == "environment":
        _play(page)
    page.screenshot(path=HERE / f"{name}.png")
    context.close()
    print(f"{name}.png  {place}")


def _play(page: Page) -> None:
    """One call and an answer, by hand."""
    task = page.locator('[data-part="trial"] .chosen dd')
    task.wait_for(timeout=60_000)
    page.get_by_label("expression of calculate").fill(task.inner_text())
    page.get_by_label("what the policy says").nth(1).fill("about four thousand")
    page.get_by_role("button", name="Play", exact=True).click()
    page.locator("[data-reward]").wait_for(timeout=60_000)
    page.evaluate("scrollTo(0, 0)")


def _point_at_a_token(page: Page) -> None:
    tokens = page.locator(".turn .tok")
    tokens.nth(min(7, tokens.count() - 1)).hover()
    page.wait_for_timeout(200)


if __name__ == "__main__":
    main()
