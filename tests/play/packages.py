"""The packages that play, where they are installed, and what happens in their episodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INSTALLED = Path(os.environ.get("GSPO_TEST_AGENTS", Path(__file__).parents[2] / ".make" / "agents"))
BY_HAND = ("parallel", "retry", "edited", "sub_agent", "best_of", "compacted", "other_tools")

IN_RUNS = ("parallel", "retry", "edited", "sub_agent", "best_of", "compacted")

TOLD_ANEW = ("parallel", "retry", "edited", "sub_agent", "best_of")


@dataclass(frozen=True)
class Package:
    name: str
    script: str
    features: tuple[str, ...] = BY_HAND
    wild: bool = True
    """It takes calls of tools that there are not."""
    huge: bool = True
    """It takes numbers of more than 64 bits."""

    ends: tuple[str, ...] = ()
    """Stop texts that it always sends."""

    with_: tuple[str, ...] = ()
    """Further packages whose versions matter."""

    @property
    def shows(self) -> tuple[str, ...]:
        return (self.name, *self.with_)


PACKAGES: Mapping[str, Package] = {
    one.name: one
    for one in (
        Package("openai", "play_openai.py"),
        Package("anthropic", "play_anthropic.py"),
        Package("google-genai", "play_google_genai.py"),
        Package("openai-agents", "play_openai_agents.py", (*IN_RUNS, "handoff"), wild=False, with_=("openai",)),
        Package("langgraph", "play_langgraph.py", IN_RUNS, huge=False, with_=("langchain-openai",)),
        Package("pydantic-ai-slim", "play_pydantic_ai.py", IN_RUNS, with_=("openai",)),
        Package(
            "smolagents",
            "play_smolagents.py",
            TOLD_ANEW,
            wild=False,
            ends=("Observation:", "Calling tools:"),
            with_=("openai",),
        ),
        Package("verifiers", "play_verifiers.py", with_=("openai", "anthropic")),
    )
}


def python_of(package: Package) -> Path:
    return INSTALLED / package.name / "bin" / "python"
