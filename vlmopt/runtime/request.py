"""The contract of `generate`: which calls the stages serve, read from the arguments; all others are named for stock."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlmopt.runtime.contract import NONE_MATTERS, PARAMETERS, names
from vlmopt.weights import Weights


class HandedToStock(Exception):
    """The call is stock's; the message is the reason that `status` counts."""


@dataclass(frozen=True)
class Request:
    """A call that the stages serve: one prompt.

    `ids` [1, T] as given; `id_list` the same on the host; `types` 0 for text and 1 for image tokens; `grids` in
    patches; `draws` whether tokens are sampled; `shaping` the options that shape the scores, empty where none does.
    """

    ids: Tensor
    id_list: list[int]
    types: list[int]
    pixels: Tensor | None
    grids: tuple[tuple[int, int, int], ...]
    max_new_tokens: int
    eos: frozenset[int]
    streamer: Any
    draws: bool = False
    shaping: dict[str, Any] = field(default_factory=dict)


def read(arguments: dict[str, Any], defaults: dict[str, Any], device: torch.device, weights: Weights) -> Request:
    """Read the arguments of one `generate` call.

    Args:
        arguments: every argument by name, `generation_config` already merged in.
        defaults: neutral values of the generation options, by name.

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
    id_list, types = _host_copies(ids, inputs, options)
    grids = _grids(inputs, id_list, types, weights)
    return Request(
        ids=ids,
        id_list=id_list,
        types=types,
        pixels=inputs.get("pixel_values"),
        grids=grids,
        max_new_tokens=_limit(options, len(id_list)),
        eos=_as_set(options.get("eos_token_id")),
        streamer=streamer,
        draws=bool(options.get("do_sample")),
        shaping=_shaping(options, defaults),
    )


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
    used = names("shapes") | names("draws") if draws else names("shapes")
    values = {name: options.get(name, defaults[name]) for name in sorted(used)}
    idle = not draws and all(value == defaults[name] or value is False for name, value in values.items())
    return {} if idle else values


def _ids(inputs: dict[str, Any], device: torch.device) -> Tensor:
    given = [inputs.pop(name) for name in ("inputs", "input_ids") if name in inputs]
    if len(given) != 1:
        raise HandedToStock("no input_ids" if not given else "both inputs and input_ids")
    ids = given[0]
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 2 or ids.numel() == 0:
        raise HandedToStock("input_ids is not an int64 matrix")
    if ids.shape[0] != 1:
        raise HandedToStock("several prompts")
    if ids.device != device:
        raise HandedToStock("input_ids on another device")
    return ids


def _host_copies(ids: Tensor, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and token types in one transfer; the mask, if any, must be all ones."""
    rows = [ids]
    for name in ("attention_mask", "mm_token_type_ids"):
        row = inputs.get(name)
        if row is not None:
            if row.shape != ids.shape or row.device != ids.device or row.is_floating_point():
                raise HandedToStock(f"{name} of another shape, device or type")
            rows.append(row.long())
    copies = torch.cat(rows).tolist()
    id_list = copies.pop(0)
    if "attention_mask" in inputs:
        if any(value != 1 for value in copies.pop(0)):
            raise HandedToStock("padding")
    elif options.get("pad_token_id") is None or options["pad_token_id"] in id_list:
        raise HandedToStock("no attention mask, and padding cannot be excluded")
    return id_list, copies[0] if copies else [0] * len(id_list)


def _grids(
    inputs: dict[str, Tensor], id_list: list[int], types: list[int], weights: Weights
) -> tuple[tuple[int, int, int], ...]:
    """Check that images, image tokens and token types agree; stock owns every disagreement and its exception."""
    pixels, grid_thw, tokens = inputs.get("pixel_values"), inputs.get("image_grid_thw"), weights.tokens
    if (pixels is None) != (grid_thw is None):
        raise HandedToStock("pixel_values without image_grid_thw, or the reverse")
    if pixels is None:
        if any(types) or tokens.image in id_list or tokens.video in id_list:
            raise HandedToStock("image tokens without images")
        return ()
    if "mm_token_type_ids" not in inputs:
        raise HandedToStock("images without mm_token_type_ids")
    if any((kind != 0) != (token == tokens.image) or kind > 1 for kind, token in zip(types, id_list, strict=True)):
        raise HandedToStock("token types that do not match the image tokens")
    if grid_thw.dim() != 2 or grid_thw.shape[1] != 3 or grid_thw.is_floating_point() or pixels.dim() != 2:
        raise HandedToStock("images of an unusual shape")
    if pixels.shape[1] != weights.vision.patch.weight[0].numel():
        raise HandedToStock("pixel_values of another width")
    if pixels.device != inputs["mm_token_type_ids"].device:
        raise HandedToStock("pixel_values on another device")
    grids = tuple((frames, height, width) for frames, height, width in grid_thw.tolist())
    if not grids or sum(frames * height * width for frames, height, width in grids) != pixels.shape[0]:
        raise HandedToStock("pixel_values that do not fit image_grid_thw")
    return grids


def _limit(options: dict[str, Any], prompt: int) -> int:
    longest, new = options.get("max_length"), options.get("max_new_tokens")
    if (longest is None) == (new is None):
        raise HandedToStock("neither or both of max_new_tokens and max_length")
    limit = new if new is not None else longest - prompt
    if not isinstance(limit, int) or limit < 1:
        raise HandedToStock("no room for a new token")
    return limit


def _as_set(eos: Any) -> frozenset[int]:
    if eos is None:
        return frozenset()
    if isinstance(eos, Tensor):
        eos = eos.tolist()
    return frozenset([eos] if isinstance(eos, int) else eos)
