"""Counts from engine processes to the front end, over real sockets."""

import time
import uuid

import pytest
import zmq

from vlmopt.serving.channel import Listener, Sender, address_of


@pytest.fixture
def address():
    return address_of(uuid.uuid4().hex)


def test_the_newest_of_every_engine_arrives_whoever_is_there_first(address):
    early = Sender(address)
    early.send(0, {"n": 0})  # nobody listens: it is dropped, and nothing waits
    listener = Listener(address)
    late = Sender(address)
    deadline, found = time.monotonic() + 10, {}
    while found != {0: {"n": 1}, 3: {"n": 2}}:
        assert time.monotonic() < deadline, f"heard only {found}"
        early.send(0, {"n": 1})
        late.send(3, {"n": 2})
        time.sleep(0.01)
        found |= listener.newest()
    for n in range(10, 20):
        late.send(3, {"n": n})
    while found[3] != {"n": 19}:
        assert time.monotonic() < deadline
        found |= listener.newest()
    listener.close()


def test_an_address_that_cannot_be_had_is_an_error():
    with pytest.raises(zmq.ZMQError):
        Listener("ipc:///no/such/folder/socket")
