"""A stand-in for an engine of several ranks: the embedded engine, and processes that take its other places in a group.

    python -m tests.services.engines.ranked_engine NUM_RANKS FOLDER [arguments of services.engine]

It says ``tp_size NUM_RANKS`` and places its ranks as SGLang's workers place themselves (``rank_offset`` and the number
of the rank). Each receives every block; the digests of what rank R received are lines of FOLDER/R. The model is not
divided: the first rank computes all of it. So this shows that sender and members count alike, and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from services.engine import __main__ as engine_main
from services.engine import app
from services.engine.engine import EmbeddedEngine
from services.engine.weight_receiver import JoinBody, TensorsBody, WeightReceiver
from services.engines.process_group import ProcessGroup
from services.engines.weight_buckets import num_bytes
from services.process.children import die_with_parent


class Ranks(WeightReceiver):
    """The engine's receiver, and one more process for each further rank."""

    num, folder = 1, Path()

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine)
        command = [sys.executable, "-m", __spec__.name, "rank"]
        self._others = [
            subprocess.Popen(
                [*command, str(rank), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                preexec_fn=die_with_parent(),
            )
            for rank in range(1, self.num)
        ]

    async def join(self, body: JoinBody) -> None:
        joining = self._tell({"join": msgspec.to_builtins(body)})
        await asyncio.gather(super().join(body), *joining)

    async def receive(self, body: TensorsBody) -> None:
        receiving = self._tell({"receive": sum(map(num_bytes, body.dtypes, body.shapes)), "group": body.group_name})
        await asyncio.gather(super().receive(body), *receiving)

    def _tell(self, what: dict[str, Any]) -> list[Any]:
        return [asyncio.to_thread(_ask, process, what) for process in self._others]


def _ask(process: subprocess.Popen[bytes], what: dict[str, Any]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(what).encode() + b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"done\n"


async def be_rank(rank: int, folder: Path) -> None:
    groups: dict[str, ProcessGroup] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        if place := told.get("join"):
            groups[place["group_name"]] = await ProcessGroup.join(
                host=place["master_address"],
                port=place["master_port"],
                rank=place["rank_offset"] + rank,
                world_size=place["world_size"],
                name=place["group_name"],
                backend=place["backend"],
                timeout_s=60.0,
            )
        else:
            block = torch.empty(told["receive"], dtype=torch.uint8)
            await groups[told["group"]].broadcast([block])
            with (folder / str(rank)).open("a") as file:
                file.write(hashlib.sha256(block.numpy().data).hexdigest() + "\n")
        print("done", flush=True)


def serve(num: int, folder: Path, arguments: list[str]) -> int:
    Ranks.num, Ranks.folder = num, folder
    app.WeightReceiver = Ranks  # type: ignore[misc]
    create = app.create_app

    def create_app(engine: Any, reader: Any, decode: Any, info: Any, keys: Any = None) -> Any:
        return create(engine, reader, decode, {**info, "tp_size": num}, keys)

    engine_main.create_app = create_app
    sys.argv = ["services.engine", *arguments]
    return engine_main.main()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        asyncio.run(be_rank(int(sys.argv[2]), Path(sys.argv[3])))
    else:
        sys.exit(serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
