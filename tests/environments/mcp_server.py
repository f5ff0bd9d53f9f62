"""An MCP server with a few tools, and the reward function of the tests; started by the adapter as a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def reward(task: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], calls: Sequence[Any]) -> dict[str, float]:
    right = any(call.name == "order" and str(task["price"]) in str(call.result) for call in calls)
    return {"ordered": float(right), "said": float("thank you" in str(messages[-1]["content"]))}


def main(arguments: list[str]) -> None:
    from mcp.server import MCPServer

    server = MCPServer("shop")
    prices = {"tea": 3, "coffee": 5}

    @server.tool()
    def order(drink: str, cups: int = 1) -> str:
        """Order a drink."""
        if drink not in prices:
            raise ValueError(f"no {drink} here")
        return f"{prices[drink] * cups} dollars"

    @server.tool()
    def wait(seconds: float) -> str:
        """Take a while."""
        import time

        time.sleep(seconds)
        return "done"

    if arguments:
        server.run("streamable-http", port=int(arguments[0]))
    else:
        server.run("stdio")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
