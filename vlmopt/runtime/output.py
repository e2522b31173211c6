"""What a request has been given so far, and tokens on their way from the device to the host."""

import torch
from torch import Tensor

from vlmopt.runtime.request import Request


class Output:
    """Collects tokens, streams them, and says when the request has all it asked for."""

    def __init__(self, request: Request):
        self.tokens: list[int] = []
        self._request = request

    def wants(self, token: int) -> bool:
        """Take one token; True if another one is to follow."""
        self.tokens.append(token)
        if self._request.streamer is not None:
            self._request.streamer.put(torch.tensor([token]))
        return token not in self._request.eos and len(self.tokens) < self._request.max_new_tokens


def to_host(tokens: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A pinned copy of these tokens, and the event after which it holds them."""
    copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    copy.copy_(tokens, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return copy, done
