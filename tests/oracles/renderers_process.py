"""Runs the `renderers` package apart from the tests: one JSON request per line in, one answer per line out.

Its folder is appended to the path, so that it uses our versions of what we have too.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(folder: str, tokenizer_file: str, name: str) -> None:
    sys.path.append(folder)
    import renderers  # type: ignore[import-not-found, unused-ignore]
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file)
    configs = {
        "qwen3": renderers.Qwen3RendererConfig(),
        "llama-3": renderers.Llama3RendererConfig(),
        "glm-4.5": renderers.GLM45RendererConfig(),
    }
    renderer = renderers.create_renderer(tokenizer, configs[name])
    for line in sys.stdin:
        print(json.dumps(answer(renderer, json.loads(line))), flush=True)


def answer(renderer: Any, request: dict[str, Any]) -> Any:
    if request["do"] == "render":
        return renderer.render_ids(request["messages"], tools=request["tools"], add_generation_prompt=True)
    if request["do"] == "bridge":
        bridged = renderer.bridge_to_next_turn(
            request["prefix"], request["sampled"], request["messages"], tools=request["tools"]
        )
        return None if bridged is None else list(bridged.token_ids)
    parsed = renderer.parse_response(request["sampled"], tools=request["tools"])
    return {
        "text": parsed.content,
        "reasoning": parsed.reasoning_content or "",
        "calls": [
            [str(call.status.value), call.name, call.arguments, list(call.token_span)] for call in parsed.tool_calls
        ],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
