"""Sends a trace to an engine at its own times, whatever the engine does, and notes what becomes of each request."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vlmopt.errors import VlmoptError
from vlmopt.serving.metrics import Times
from vlmopt.serving.workload import Request


class Piece(NamedTuple):
    """What an engine says next: so many new tokens, their text where there is a tokenizer, tokens of the prompt."""

    tokens: int
    text: str = ""
    prompt_tokens: int | None = None


class Refused(Exception):
    """The engine does not take this request, now or ever; the others are not concerned."""


class EngineDied(VlmoptError):
    """The engine has ended; none of its requests will be answered."""


Ask = Callable[[Request], AsyncIterator[Piece]]


@dataclass
class Fate:
    """What has become of one request so far; times in seconds after the start of the run.

    `arrival` is when it was due, `sent` when it really went out: a driver that is late counts into the latency. In a
    closed loop `arrival` is None until the request before has ended.
    """

    request: Request
    arrival: float | None = None
    sent: float | None = None
    first_token: float | None = None
    end: float | None = None
    prompt_tokens: int | None = None
    tokens: int = 0
    text: str = ""
    outcome: str = "unfinished"
    reason: str = ""

    def times(self) -> Times:
        """As `metrics` takes it; the request must have a time of arrival."""
        request = self.request
        return Times(
            id=request.id,
            kind=request.kind,
            arrival=self.arrival,
            outcome=self.outcome,
            first_token=self.first_token,
            end=self.end,
            output_tokens=self.tokens,
            slo=request.slo,
        )


def fates_of(requests: Sequence[Request]) -> list[Fate]:
    """A fate for each request, nothing of which has happened."""
    return [Fate(request, None if request.after else request.arrives()) for request in requests]


async def drive(fates: Sequence[Fate], ask: Ask, on_end: Callable[[Fate], None] = lambda fate: None) -> None:
    """Send every request when it is due and fill in its fate as it goes; `on_end` is told of each that is over.

    A cancellation leaves the fates as they are: what was finished stays finished.

    Raises:
        EngineDied: the engine ended; what had been sent and was not over has failed, the rest is unfinished.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    over = {fate.request.id: loop.create_future() for fate in fates}

    async def one(fate: Fate) -> None:
        request = fate.request
        fate.arrival = request.arrives(await over[request.after] if request.after else 0.0)
        await asyncio.sleep(max(0.0, start + fate.arrival - loop.time()))
        fate.sent = loop.time() - start
        try:
            async for piece in ask(request):
                if fate.first_token is None and piece.tokens:
                    fate.first_token = loop.time() - start
                fate.prompt_tokens = piece.prompt_tokens
                fate.tokens += piece.tokens
                fate.text += piece.text
            _finish(fate, loop.time() - start)
        except EngineDied:
            raise
        except Refused as error:
            fate.outcome, fate.reason = "refused", str(error)
        except Exception as error:  # one request that the engine cannot digest must not end the run
            fate.outcome, fate.reason = "failed", str(error) or type(error).__name__
        over[request.id].set_result(loop.time() - start)
        on_end(fate)

    try:
        async with asyncio.TaskGroup() as group:
            for fate in fates:
                group.create_task(one(fate))
    except ExceptionGroup as died:
        for fate in fates:
            if fate.sent is not None and fate.outcome == "unfinished":
                fate.outcome, fate.reason = "failed", "the engine died"
        raise died.exceptions[0] from None


def _finish(fate: Fate, now: float) -> None:
    fate.end = now
    fate.first_token = now if fate.first_token is None else fate.first_token
    fate.outcome = "finished"
