"""A processor and a model without any network behind them: they answer by rule and record how they are called."""

import torch

from vlmopt.bench.entrants import Entrant

PROMPT = 5


class Inputs(dict):
    """What a processor returns: a mapping that moves to a device."""

    def to(self, device):
        self.device = device
        return self


class FakeProcessor:
    """Encodes a question as its characters behind `PROMPT` zeros, decodes ids back to characters."""

    def __init__(self):
        self.calls = []

    def apply_chat_template(self, messages, **kwargs):
        self.calls.append((messages, kwargs))
        image, text = messages[0]["content"]
        image["image"].load()
        ids = [0] * PROMPT + [ord(character) for character in text["text"]]
        return Inputs(input_ids=torch.tensor([ids]))

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) for i in ids.tolist() if i != 0 or not skip_special_tokens)


class FakeModel:
    """Answers the question's last word and then the end token 0.

    `before(n)` is called ahead of the n-th generate call (from 1), to fail, to interrupt or to kill there.
    """

    def __init__(self, before=lambda number: None):
        self.calls = []
        self.before = before

    def generate(self, input_ids, **kwargs):
        self.calls.append((input_ids, kwargs))
        self.before(len(self.calls))
        prompt = "".join(chr(i) for i in input_ids[0].tolist() if i)
        answer = [ord(character) for character in prompt.split()[-1]] + [0]
        new = torch.tensor([answer[: kwargs["max_new_tokens"]]])
        return torch.cat([input_ids, new], dim=1)


class FakeTarget:
    def __init__(self, before=lambda number: None):
        self.processor, self.model, self.device = FakeProcessor(), FakeModel(before), "cpu"


def fake_entrant(name, before=lambda number: None):
    """An entrant over a fake; ours says that its stages serve all calls, but the third."""
    target = FakeTarget(before)

    def status():
        calls = len(target.model.calls)
        to_stock = int(calls >= 3)
        reasons = {"no kernel": 1} if to_stock else {}
        counts = {"stages": calls - to_stock, "kernels": 0, "stock": to_stock}
        return {"active": True, "cls": "exact", "calls": counts, "stock_reasons": reasons}

    return Entrant(name, target, status if name == "ours" else dict)
