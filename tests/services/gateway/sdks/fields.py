"""Run under a Python that has `openai` or `anthropic` and nothing of ours: the fields that the package can send, by the
place where they stand, as JSON.

python sdk_fields.py openai|anthropic
"""

from __future__ import annotations

import importlib
import json
import sys

CHAT, RESPONSES = "openai.types.chat", "openai.types.responses"
PLACES = {
    "openai": {
        "chat": {
            "": [f"{CHAT}.completion_create_params:CompletionCreateParamsBase"],
            "stream_options": [f"{CHAT}:ChatCompletionStreamOptionsParam"],
            "messages[]": [
                f"{CHAT}:ChatCompletion{kind}MessageParam"
                for kind in ("System", "Developer", "User", "Assistant", "Tool")
            ],
            "messages[].content[]": [f"{CHAT}:ChatCompletionContentPartTextParam"],
            "messages[].tool_calls[]": [f"{CHAT}:ChatCompletionMessageFunctionToolCallParam"],
            "tools[]": [f"{CHAT}:ChatCompletionFunctionToolParam"],
            "tools[].function": ["openai.types.shared_params:FunctionDefinition"],
        },
        "responses": {
            "": [f"{RESPONSES}.response_create_params:ResponseCreateParamsBase"],
            "text": [f"{RESPONSES}:ResponseTextConfigParam"],
            "input[]": [
                f"{RESPONSES}:EasyInputMessageParam",
                f"{RESPONSES}:ResponseOutputMessageParam",
                f"{RESPONSES}:ResponseFunctionToolCallParam",
                f"{RESPONSES}:ResponseReasoningItemParam",
                f"{RESPONSES}.response_input_item_param:FunctionCallOutput",
                f"{RESPONSES}.response_input_item_param:Message",
            ],
            "input[].content[]": [f"{RESPONSES}:ResponseInputTextParam", f"{RESPONSES}:ResponseOutputTextParam"],
            "tools[]": [f"{RESPONSES}:FunctionToolParam"],
        },
    },
    "anthropic": {
        "messages": {
            "": [
                "anthropic.types.message_create_params:MessageCreateParamsBase",
                "anthropic.types:MessageCountTokensParams",
            ],
            "output_config": ["anthropic.types:OutputConfigParam"],
            "system[]": ["anthropic.types:TextBlockParam"],
            "messages[]": [
                f"anthropic.types.message_param:{kind}MessageParam" for kind in ("User", "Assistant", "System")
            ],
            "messages[].content[]": [
                f"anthropic.types:{kind}BlockParam" for kind in ("Text", "ToolUse", "ToolResult", "Thinking")
            ],
            "tools[]": ["anthropic.types:ToolParam"],
        }
    },
}


def fields(name: str) -> list[str]:
    module, _, kind = name.partition(":")
    return list(getattr(importlib.import_module(module), kind).__annotations__)


def main() -> None:
    found = {
        dialect: {place: sorted({one for name in names for one in fields(name)}) for place, names in places.items()}
        for dialect, places in PLACES[sys.argv[1]].items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
