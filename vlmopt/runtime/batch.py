"""Several prompts in one call: each over a part of the cache of its own, all through the same products."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vlmopt.runtime.cache import bucket
from vlmopt.runtime.request import Batch
from vlmopt.runtime.sampler import Sampler
from vlmopt.runtime.stock import sampler_of
from vlmopt.stages.decode import decode_step

if TYPE_CHECKING:
    from vlmopt.runtime.generate import Engine


def serve(engine: "Engine", model: nn.Module, batch: Batch) -> Tensor:
    """Ids [B, T + new], padded after a row's end; the call ends with its last row.

    Every prompt is prefilled by itself, so a row says what the prompt alone says. Class near: stock's padded products
    and masked attention round otherwise.
    """
    share = bucket(batch.ids.shape[1] + batch.first.max_new_tokens)
    engine.reserve(share * len(batch.rows))
    sampler = sampler_of(model, batch.first, batch.ids)
    with engine.arena.held():
        found = [
            engine.prefill(model, request, engine.cache.buffer[:, :, :, number * share : (number + 1) * share])
            for number, request in enumerate(batch.rows)
        ]
        token = engine.choose(torch.cat([h for h, _ in found]), batch.ids, sampler)
    lengths = [len(request.id_list) for request in batch.rows]
    deltas = torch.tensor([delta for _, delta in found], device=engine.device)
    return _decode(engine, token, batch, lengths, deltas, share, sampler)


def _decode(
    engine: "Engine",
    token: Tensor,
    batch: Batch,
    lengths: list[int],
    deltas: Tensor,
    share: int,
    sampler: Sampler | None,
) -> Tensor:
    """One step after the other for all rows; a row that has ended goes on over padding, as stock's does."""
    ids = batch.ids
    ends = torch.tensor(sorted(batch.first.eos), dtype=torch.int64, device=engine.device)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=engine.device)
    starts = torch.arange(len(ids), device=engine.device) * share
    ops = replace(engine.ops, decode_layer=None)  # it takes rows of one sequence
    for new in range(batch.first.max_new_tokens):
        if batch.first.eos:
            token = token.masked_fill(ended, batch.pad)
        ids = torch.cat([ids, token[:, None]], dim=-1)
        ended |= torch.isin(token, ends)
        if new + 1 == batch.first.max_new_tokens or bool(ended.all()):
            break
        # 16 bytes apart, since kernels take an address at a multiple of 16 bytes without a variant of their own
        places = torch.tensor([[length + new, 0] for length in lengths], device=engine.device)
        rows = places[:, 0]
        angles = tuple(table.index_select(0, rows + deltas) for table in engine.rope_table)
        attend = _per_row(engine, places, [length + new + 1 for length in lengths], share)
        h = decode_step(token, angles, engine.cache.buffer, starts + rows, attend, engine.weights.text, ops)
        token = engine.choose(h, ids, sampler)
    return ids


def _per_row(engine: "Engine", places: Tensor, lengths: list[int], share: int) -> Callable[..., Tensor]:
    """Attention of each query over its own prompt's part of the cache; `places` [B, 2] begin with its newest row."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **scales: Tensor) -> Tensor:
        outputs = []
        for i, length in enumerate(lengths):
            own = slice(i * share, (i + 1) * share)
            one = partial(engine.ops.decode_attention, length=length)
            if engine.ops.decode_attention_live is not None:
                one = partial(engine.ops.decode_attention_live, row=places[i, :1])
            outputs.append(one(q[i : i + 1], k[:, own], v[:, own], **scales))
        return torch.cat(outputs)

    return attend
