"""An engine that answers from a clock: for tests of what stands around an engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from vlmopt.serving.admission import Settings
from vlmopt.serving.drive import EngineDied, Piece, Refused
from vlmopt.serving.prompts import Prompt
from vlmopt.serving.workload import Request

STEP = 0.001  # seconds a token


class FakeEngine:
    """Answers each request with its own reference, a token a character; `dies_after` answers it is no more."""

    def __init__(self, dies_after: int | None = None, refuses: str = ""):
        self.dies_after, self.refuses = dies_after, refuses
        self.answered = 0
        self.settings = [Settings()]
        self.asked: list[Request] = []
        self.stopped = False

    async def ask(self, request: Request) -> AsyncIterator[Piece]:
        self.asked.append(request)
        if self.refuses and self.refuses in (request.prompt or ""):
            raise Refused("can never fit")
        for character in request.reference or "x" * 3:
            await asyncio.sleep(STEP)
            if self.dies_after is not None and self.answered >= self.dies_after:
                raise EngineDied("the engine died")
            yield Piece(1, character)
        self.answered += 1

    async def switch(self, **settings: Any) -> dict[str, Any]:
        if settings:
            self.settings.append(Settings.make(settings, self.settings[-1]))
        return {"counts": {"started": len(self.asked)}, "settings": self.settings[-1].as_dict()}

    async def memory(self, restart: bool = False) -> dict[str, Any]:
        return {"device": "a clock", "peak": 12345}

    async def environment(self) -> dict[str, Any]:
        return {"device": "clock", "commit": "c0ffee", "vllm": "0.32.0"}

    def load(self) -> dict[str, float]:
        return {"kv_cache_usage": 0.5, "running": 1, "waiting": 2, "preemptions": self.answered}

    def versions(self) -> dict[str, str]:
        return {"vllm": "0.32.0"}

    def stop(self) -> None:
        self.stopped = True


PROMPTS = tuple(
    Prompt(f"{kind}{i}", kind, "zh", f"{kind} {i}?", "月亮不会自己发光" * size)
    for kind, size in (("question", 1), ("explain", 3))
    for i in range(4)
)


def model_folder(place: Path) -> Path:
    """A folder that passes for a model's."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text("{}")
    return place
