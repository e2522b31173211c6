"""The contract of `generate`: which calls the stages serve, read from the arguments; all others are named for stock."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmopt.runtime.contract import NONE_MATTERS, PARAMETERS, names
from vlmopt.stages.connector import Grid, image_runs, require_fit
from vlmopt.weights import Weights

MAX_ROWS = 8
"""Prompts in one call: products of so many rows have the same bits a row as that row alone."""

Row = tuple[np.ndarray, np.ndarray]
"""A prompt's ids and token types, [T] int64 each, on the host."""
SHAPES, DRAWS = sorted(names("shapes")), sorted(names("shapes") | names("draws"))
"""The options that shape the scores of a call that does not sample, and of one that does."""
MISFIT = "image tokens that do not fit the images"


class HandedToStock(Exception):
    """The call is stock's; the message is the reason that `status` counts."""


@dataclass(frozen=True)
class Request:
    """A call that the stages serve: one prompt.

    `ids` [1, T] as given; `id_list` the same on the host; `types` [T] 0 for text and 1 for image tokens, whose runs fit
    the `grids`, which are in patches; `draws` whether tokens are sampled; `shaping` the options that shape the scores,
    empty where none does; `seen` the images' features and DeepStack's, once the tower is at work on them.
    """

    ids: Tensor
    id_list: list[int]
    types: np.ndarray
    pixels: Tensor | None
    grids: tuple[Grid, ...]
    max_new_tokens: int
    eos: frozenset[int]
    streamer: Any
    draws: bool = False
    shaping: dict[str, Any] = field(default_factory=dict)
    seen: tuple[Tensor, list[Tensor]] | None = None


@dataclass(frozen=True)
class Batch:
    """A call that the stages serve: several prompts, each a request of its own without its padding.

    `ids` [B, T] as given, padded on the left; `pad` follows a row's end.
    """

    rows: list[Request]
    ids: Tensor
    pad: int | None

    @property
    def first(self) -> Request:
        """The first prompt; the options are the same for all."""
        return self.rows[0]


def read(
    arguments: dict[str, Any], defaults: dict[str, Any], device: torch.device, weights: Weights, batches: bool
) -> Request | Batch:
    """Read the arguments of one `generate` call.

    Args:
        arguments: every argument by name, `generation_config` already merged in.
        defaults: neutral values of the generation options, by name.
        batches: whether several prompts are served.

    Raises:
        HandedToStock: something in the call is not served.
    """
    for name, value in arguments.items():
        if value is None and (name in NONE_MATTERS or not (name in PARAMETERS or name in defaults)):
            raise HandedToStock(f"{name}=None")
    options = {name: value for name, value in arguments.items() if name in defaults}
    inputs = {name: value for name, value in arguments.items() if name not in defaults and value is not None}
    _check_options(options, defaults)
    streamer = inputs.pop("streamer", None)
    ids = _ids(inputs, device)
    for name, value in inputs.items():
        if name not in PARAMETERS or not PARAMETERS[name].served:
            raise HandedToStock(f"argument {name}")
        if not isinstance(value, Tensor):
            raise HandedToStock(f"{name} is not a tensor")
    if len(ids) > 1 and (not batches or len(ids) > MAX_ROWS or streamer is not None):
        raise HandedToStock("several prompts")
    rows, grids = _host_copies(ids, inputs, options)
    _check_images(inputs, rows, grids, weights)
    common = {
        "max_new_tokens": _limit(options, ids, weights),
        "eos": _as_set(options.get("eos_token_id")),
        "streamer": streamer,
        "draws": bool(options.get("do_sample")),
        "shaping": _shaping(options, defaults),
    }
    if len(ids) == 1:
        (row, types), pixels = rows[0], inputs.get("pixel_values")
        _check_fit(types, grids, weights)
        return Request(ids=ids, id_list=row.tolist(), types=types, pixels=pixels, grids=grids, **common)
    pad = options.get("pad_token_id")
    if pad is None and common["eos"]:
        raise HandedToStock("several prompts without a pad_token_id")
    requests = _each(ids, rows, grids, inputs.get("pixel_values"), common)
    for request in requests:
        _check_fit(request.types, request.grids, weights)
    return Batch(requests, ids, pad)


def _check_fit(types: np.ndarray, grids: tuple[Grid, ...], weights: Weights) -> None:
    """Nothing is computed for a prompt whose images do not fit, so that stock finds all as it was."""
    try:
        if grids:
            require_fit(image_runs(types), grids, weights.vision.merge_size)
    except ValueError as error:
        raise HandedToStock(MISFIT) from error


def _each(
    ids: Tensor, rows: list[Row], grids: tuple[Grid, ...], pixels: Tensor | None, common: dict[str, Any]
) -> list[Request]:
    """Every prompt of a batch with its own images, which come one after the other in the prompts' order."""
    images = [len(image_runs(types)) for _, types in rows]
    if sum(images) != len(grids):
        raise HandedToStock(MISFIT)
    requests, next_image, next_patch = [], 0, 0
    for number, ((row, types), count) in enumerate(zip(rows, images, strict=True)):
        own = grids[next_image : next_image + count]
        patches = sum(frames * height * width for frames, height, width in own)
        requests.append(
            Request(
                ids=ids[number : number + 1, ids.shape[1] - len(row) :].clone(),  # at an address like any other's
                id_list=row.tolist(),
                types=types,
                pixels=pixels[next_patch : next_patch + patches] if count else None,
                grids=own,
                **common,
            )
        )
        next_image, next_patch = next_image + count, next_patch + patches
    return requests


def _check_options(options: dict[str, Any], defaults: dict[str, Any]) -> None:
    if options.get("use_cache") is False:
        raise HandedToStock("use_cache=False")
    draws = options.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        raise HandedToStock("do_sample is not a bool")
    for name, value in options.items():
        role = PARAMETERS[name].role if name in PARAMETERS else "stock"
        if role == "draws" or name == "max_length":
            continue
        if value is None and defaults[name] is None:
            continue
        if value is None or (role == "shapes" and not isinstance(value, int | float | list | tuple)):
            raise HandedToStock(f"option {name}")
        if role == "stock" and not _is_neutral(value, defaults[name]):
            raise HandedToStock(f"option {name}")


def _is_neutral(value: Any, default: Any) -> bool:
    return (value is False and default is None) or (not isinstance(value, Tensor) and bool(value == default))


def _shaping(options: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Every option that shapes this call's scores, stock's default where it is not given; empty if all do nothing."""
    draws = bool(options.get("do_sample"))
    values = {name: options.get(name, defaults[name]) for name in (DRAWS if draws else SHAPES)}
    idle = not draws and all(value == defaults[name] or value is False for name, value in values.items())
    return {} if idle else values


def _ids(inputs: dict[str, Any], device: torch.device) -> Tensor:
    given = [inputs.pop(name) for name in ("inputs", "input_ids") if name in inputs]
    if len(given) != 1:
        raise HandedToStock("no input_ids" if not given else "both inputs and input_ids")
    ids = given[0]
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 2 or ids.numel() == 0:
        raise HandedToStock("input_ids is not an int64 matrix")
    if ids.device != device:
        raise HandedToStock("input_ids on another device")
    return ids


def _host_copies(ids: Tensor, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[list[Row], tuple[Grid, ...]]:
    """Ids and token types of every prompt, the padding before it left out (one prompt has none), and the images' grids.

    All in one transfer, since the host waits for each.
    """
    parts = [ids]
    for name in ("attention_mask", "mm_token_type_ids"):
        part = inputs.get(name)
        if part is not None:
            if part.shape != ids.shape or part.device != ids.device or part.is_floating_point():
                raise HandedToStock(f"{name} of another shape, device or type")
            parts.append(part.long())
    size, grid_thw = len(parts) * ids.numel(), inputs.get("image_grid_thw")
    if grid_thw is not None and _are_grids(grid_thw):
        parts.append(grid_thw.to(ids.device, torch.int64))
    host = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    copies = list(host[:size].reshape(-1, *ids.shape))
    grids = tuple(map(tuple, host[size:].reshape(-1, 3).tolist()))
    id_rows = copies.pop(0)
    if "attention_mask" in inputs:
        starts = [_padding(mask) for mask in copies.pop(0)]
    elif options.get("pad_token_id") is None or any(options["pad_token_id"] in row for row in id_rows.tolist()):
        raise HandedToStock("no attention mask, and padding cannot be excluded")
    else:
        starts = [0] * len(id_rows)
    type_rows = copies[0] if copies else np.zeros_like(id_rows)
    if (len(ids) == 1 and starts[0]) or any(types[:n].any() for types, n in zip(type_rows, starts, strict=True)):
        raise HandedToStock("padding")
    return [(row[n:], types[n:]) for row, types, n in zip(id_rows, type_rows, starts, strict=True)], grids


def _padding(mask: np.ndarray) -> int:
    """How many positions are padding before the first that counts."""
    counts = mask == 1
    start = int(counts.argmax())
    if not counts[start:].all() or mask[:start].any():
        raise HandedToStock("padding")
    return start


def _are_grids(grid_thw: Tensor) -> bool:
    return grid_thw.dim() == 2 and grid_thw.shape[1] == 3 and not grid_thw.is_floating_point()


def _check_images(inputs: dict[str, Tensor], rows: list[Row], grids: tuple[Grid, ...], weights: Weights) -> None:
    """Check that images, image tokens and token types agree; stock owns every disagreement and its exception."""
    ids, types = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    pixels, tokens = inputs.get("pixel_values"), weights.tokens
    if (pixels is None) != ("image_grid_thw" not in inputs):
        raise HandedToStock("pixel_values without image_grid_thw, or the reverse")
    images = ids == tokens.image
    if pixels is None:
        if types.any() or images.any() or (ids == tokens.video).any():
            raise HandedToStock("image tokens without images")
        return
    if "mm_token_type_ids" not in inputs:
        raise HandedToStock("images without mm_token_type_ids")
    if (types != images).any():
        raise HandedToStock("token types that do not match the image tokens")
    if not _are_grids(inputs["image_grid_thw"]) or pixels.dim() != 2:
        raise HandedToStock("images of an unusual shape")
    if pixels.shape[1] != weights.vision.patch.weight[0].numel():
        raise HandedToStock("pixel_values of another width")
    if pixels.device != inputs["mm_token_type_ids"].device:
        raise HandedToStock("pixel_values on another device")
    if not grids or sum(frames * height * width for frames, height, width in grids) != pixels.shape[0]:
        raise HandedToStock("pixel_values that do not fit image_grid_thw")


def _limit(options: dict[str, Any], ids: Tensor, weights: Weights) -> int:
    """New tokens at most; the static cache is as long as these may make it, where stock's grows with what is said."""
    rows, prompt = ids.shape
    longest, new = options.get("max_length"), options.get("max_new_tokens")
    if (longest is None) == (new is None):
        raise HandedToStock("neither or both of max_new_tokens and max_length")
    limit = new if new is not None else longest - prompt
    if not isinstance(limit, int) or limit < 1:
        raise HandedToStock("no room for a new token")
    if rows * (prompt + limit) > weights.text.max_positions:
        raise HandedToStock("more positions than the model was made for")
    return limit


def _as_set(eos: Any) -> frozenset[int]:
    if eos is None:
        return frozenset()
    if isinstance(eos, Tensor):
        eos = eos.tolist()
    return frozenset([eos] if isinstance(eos, int) else eos)
