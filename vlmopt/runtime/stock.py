"""What is asked of transformers' own `generate`: its defaults, its processors, and the calls that are its own."""

from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.cache_utils import Cache

from vlmopt.runtime.request import HandedToStock, Request
from vlmopt.runtime.sampler import Sampler

NEUTRAL = {**dict.fromkeys(GenerationConfig().to_dict()), **GenerationConfig._get_default_generation_params()}
BOOKKEEPING = {"transformers_version", "_from_model_config"}
GENERATION = frozenset(GenerationConfig._get_default_generation_params())


def sampler_of(model: nn.Module, request: Request, ids: Tensor) -> Sampler | None:
    """Stock's own processors for this call's options and ids [B, T]; None where the largest logit is the answer.

    Raises:
        HandedToStock: stock refuses an option's value; the exception is its to raise.
    """
    if not request.draws and not request.shaping:
        return None
    try:
        config = GenerationConfig(do_sample=request.draws, **request.shaping)
        shape = model._get_logits_processor(config, ids.shape[1], ids, device=ids.device)
    except (ValueError, TypeError) as error:
        raise HandedToStock("an option's value that stock refuses") from error
    return Sampler(shape, request.draws)


def merged(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, with the generation options filled as stock does: call, its config, the model's own."""
    given = arguments.pop("generation_config", None)
    if given is None and _has_generation_options(model.config):
        raise HandedToStock("generation options in the model's configuration")
    if not isinstance(given, GenerationConfig | None):
        raise HandedToStock("generation_config of another type")
    options = {}
    for source in (model.generation_config, given):
        for name, value in vars(source).items() if source is not None else ():
            if value is not None and name not in BOOKKEEPING and not name.startswith("_"):
                options[name] = value
    if not options.keys() <= NEUTRAL.keys():
        raise HandedToStock(f"option {next(name for name in options if name not in NEUTRAL)}")
    return {**options, **arguments}


def _has_generation_options(config: PreTrainedConfig) -> bool:
    """Whether stock finds generation options in a model's configuration, which it refuses.

    Stock reads them one by one through the configuration's slow attributes; where none can be there it is not asked.
    """
    own, renamed = (object.__getattribute__(config, name) for name in ("__dict__", "attribute_map"))
    if not renamed and GENERATION.isdisjoint(own) and not any(map(hasattr, repeat(type(config)), GENERATION)):
        return False
    return bool(config._get_generation_parameters())


def stock_vision(model: nn.Module, request: Request, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Features and DeepStack taps by stock's own vision tower, for the ablation of our stage."""
    grid = torch.tensor(request.grids, device=request.ids.device)
    output = model.model.visual(request.pixels.type(dtype), grid_thw=grid, return_dict=True)
    return output.pooler_output, output.deepstack_features


def stock_connector(model: nn.Module, request: Request, features: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Merged embeddings, positions and delta by stock's own methods, for the ablation of our connector."""
    stock, ids = model.model, request.ids
    h = stock.get_input_embeddings()(ids)
    if features is None:
        return h[0], torch.arange(ids.shape[1], device=ids.device).expand(3, -1), 0
    image_mask, _ = stock.get_placeholder_mask(ids, inputs_embeds=h, image_features=features)
    h = h.masked_scatter(image_mask, features.to(h.dtype))
    types = torch.from_numpy(request.types)[None].to(ids.device)
    grid = torch.tensor(request.grids, device=ids.device)
    position_ids, deltas = stock.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
    return h[0], position_ids[:, 0], int(deltas)


DELTAS: WeakKeyDictionary[Cache, Tensor] = WeakKeyDictionary()
"""The mRoPE delta of every conversation whose cache a caller may continue.

Stock keeps one delta on the model, that of its last call, and continues any cache with it.
"""


def call_stock(model: nn.Module, inputs: Tensor | None, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Stock's own method, which continues a cache with the delta of that cache's conversation."""
    names = "cache", "past_key_values", "cache_params"
    continued = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
    if isinstance(continued, Cache) and continued in DELTAS:
        model.model.rope_deltas = DELTAS[continued]
    output = type(model).generate(model, inputs, generation_config, *args, **kwargs)
    for cache in (continued, getattr(output, "cache", None), getattr(output, "past_key_values", None)):
        if isinstance(cache, Cache) and model.model.rope_deltas is not None:
            DELTAS[cache] = model.model.rope_deltas
    return output
