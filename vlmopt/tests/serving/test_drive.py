"""The driver: requests go out on time, and each ends with what became of it, whatever the others do."""

import asyncio

import pytest

from vlmopt.serving.drive import EngineDied, Piece, Refused, drive, fates_of
from vlmopt.serving.workload import Request


def request(name: str, arrival: float = 0.0, **more: object) -> Request:
    return Request(name, arrival, "question", output_tokens=3, **more)


async def answers(asked: Request):
    """Three tokens; a request's name says what else happens to it."""
    match asked.id:
        case "refused":
            raise Refused("can never fit")
        case "odd":
            raise ValueError("its prompt is empty")
        case "dies":
            yield Piece(1, "a")
            raise EngineDied("gone")
        case "slow":
            await asyncio.sleep(30)
    for text in ("a", "b", "c"):
        yield Piece(1, text)
        await asyncio.sleep(0.01)


def driven(*requests: Request):
    fates = fates_of(requests)
    asyncio.run(drive(fates, answers))
    return {fate.request.id: fate for fate in fates}


def test_a_request_is_sent_when_due_and_timed_from_then():
    fate = driven(request("a", 0.05))["a"]
    assert 0.05 == fate.arrival <= fate.sent < fate.first_token < fate.end
    assert (fate.tokens, fate.text, fate.outcome) == (3, "abc", "finished")
    assert fate.times().latency == pytest.approx(fate.end - 0.05)


def test_open_loop_does_not_wait_for_answers():
    fates = driven(*(request(f"r{i}") for i in range(50)))
    assert max(fate.sent for fate in fates.values()) < min(fate.end for fate in fates.values())


def test_closed_loop_waits_for_the_one_before_even_if_it_fails():
    fates = driven(request("odd"), request("next", 0.02, after="odd"), request("last", 0.02, after="next"))
    assert fates["next"].arrival >= 0.02 and fates["next"].outcome == "finished"
    assert fates["last"].arrival >= fates["next"].end + 0.02


def test_what_the_engine_cannot_digest_ends_alone_with_its_reason():
    fates = driven(request("refused"), request("odd"), request("fine"))
    assert [(fate.outcome, fate.reason) for fate in fates.values()] == [
        ("refused", "can never fit"),
        ("failed", "its prompt is empty"),
        ("finished", ""),
    ]


def test_when_the_engine_dies_what_was_finished_stays_and_the_rest_is_told_apart():
    fates = fates_of([request("fine"), request("slow"), request("dies", 0.2), request("later", 60.0)])
    with pytest.raises(EngineDied, match="gone"):
        asyncio.run(drive(fates, answers))
    assert [fate.outcome for fate in fates] == ["finished", "failed", "failed", "unfinished"]
    assert fates[1].reason == "the engine died"


def test_a_cancelled_run_keeps_what_was_finished_and_leaves_the_engine_no_request():
    left = []

    async def noticing(asked: Request):
        try:
            async for piece in answers(asked):
                yield piece
        except asyncio.CancelledError:
            left.append(asked.id)
            raise

    fates = fates_of([request("fine"), request("slow"), request("later", 60.0)])

    async def stop_soon():
        task = asyncio.ensure_future(drive(fates, noticing))
        await asyncio.sleep(0.3)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stop_soon())
    assert [fate.outcome for fate in fates] == ["finished", "unfinished", "unfinished"]
    assert left == ["slow"]


def test_each_end_is_told_once():
    told = []
    fates = fates_of([request("a"), request("odd"), request("refused")])
    asyncio.run(drive(fates, answers, lambda fate: told.append(fate.request.id)))
    assert sorted(told) == ["a", "odd", "refused"]
