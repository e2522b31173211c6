"""How a scheduler's counts reach the front end: ZeroMQ on this machine, from every engine process to one listener.

vLLM's own statistics cross between these processes in fixed types that have no room for more. A message holds all
counts since a start, so that the newest says everything and one that is lost is no loss.
"""

import tempfile
from pathlib import Path
from typing import Any

import zmq


def address_of(instance: str) -> str:
    """Where the engines of a vLLM instance send to; `VllmConfig.instance_id` is the same in all its processes."""
    return f"ipc://{Path(tempfile.gettempdir()) / f'vlmopt-{instance}'}"


class Sender:
    """Sends without ever waiting; where nobody listens, what is sent is dropped."""

    def __init__(self, address: str):
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, engine: int, message: dict[str, Any]) -> None:
        """Send the newest `message` of the engine with this number."""
        self._socket.send_json([engine, message], zmq.NOBLOCK)


class Listener:
    """Hears all senders of an address.

    Raises:
        zmq.ZMQError: it cannot be bound.
    """

    def __init__(self, address: str):
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.bind(address)

    def newest(self) -> dict[int, dict[str, Any]]:
        """The last message of each engine that has sent since the last call, without waiting."""
        heard: dict[int, dict[str, Any]] = {}
        while self._socket.poll(0):
            engine, message = self._socket.recv_json(zmq.NOBLOCK)
            heard[engine] = message
        return heard

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(linger=0)
