"""The contract of `generate` as data: every parameter that transformers knows, who serves it, and why.

`runtime/request.py` decides by this table, the README shows it, and a parameter that it lacks goes to stock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Role = Literal["loop", "shapes", "draws", "input", "stock"]


@dataclass(frozen=True)
class Rule:
    """What holds for the parameters `names`.

    Roles: "loop" the loop honours the value; "shapes" stock's own processors apply it to the scores; "draws" the same,
    and stock ignores it unless it samples; "input" a tensor that the stages read; "stock" any value but the neutral
    one hands the call to stock.
    """

    role: Role
    names: tuple[str, ...]
    reason: str

    @property
    def served(self) -> bool:
        """Whether the stages serve a call that uses these."""
        return self.role != "stock"


def _rule(role: Role, reason: str, names: str) -> Rule:
    return Rule(role, tuple(names.split()), reason)


RULES = (
    _rule("input", "one prompt, or under `fast` 2 to 8 padded on the left", "inputs input_ids attention_mask"),
    _rule("input", "images as the processor gives them", "pixel_values image_grid_thw mm_token_type_ids"),
    _rule("loop", "one of the two, within the positions that the model was made for", "max_new_tokens max_length"),
    _rule("loop", "one end or several; nothing follows it", "eos_token_id pad_token_id bos_token_id"),
    _rule("loop", "as stock does", "do_sample generation_config streamer"),
    _rule("loop", "the static cache; `use_cache=False` goes to stock", "use_cache"),
    _rule(
        *("shapes", "by stock's own processors, whether or not it samples"),
        "repetition_penalty no_repeat_ngram_size suppress_tokens remove_invalid_values renormalize_logits",
    ),
    _rule(
        *("draws", "by stock's own processors; the same seed draws the same tokens from the same logits"),
        "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff",
    ),
    _rule("stock", "videos", "pixel_values_videos video_grid_thw"),
    _rule(
        *("stock", "stands in for what the stages compute"),
        "inputs_embeds position_ids mm_encoder_outputs labels logits_to_keep",
    ),
    _rule(
        *("stock", "a cache of stock's"),
        "cache past_key_values cache_params cache_implementation cache_config max_cache_len next_sequence_length "
        "is_first_iteration",
    ),
    _rule(
        *("stock", "several answers to a prompt"),
        "num_beams num_beam_groups num_return_sequences length_penalty early_stopping diversity_penalty constraints "
        "force_words_ids low_memory",
    ),
    _rule(
        *("stock", "the caller's own code at every token"),
        "logits_processor prefix_allowed_tokens_fn stopping_criteria custom_generate trust_remote_code",
    ),
    _rule("stock", "ends that depend on text or the clock", "stop_strings tokenizer max_time"),
    _rule(
        *("stock", "processors that look at the prompt's length or at the ends"),
        "min_length min_new_tokens bad_words_ids sequence_bias forced_bos_token_id forced_eos_token_id "
        "begin_suppress_tokens exponential_decay_length_penalty token_healing watermarking_config",
    ),
    _rule(
        *("stock", "more than one forward pass for a token"),
        "guidance_scale negative_prompt_ids negative_prompt_attention_mask penalty_alpha dola_layers",
    ),
    _rule(
        *("stock", "returns more than the ids"),
        "return_dict_in_generate output_scores output_logits output_attentions output_hidden_states",
    ),
    _rule(
        *("stock", "assisted generation"),
        "assistant_model assistant_tokenizer is_assistant use_mtp num_assistant_tokens num_assistant_tokens_schedule "
        "assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind "
        "assistant_ensemble_weight speculation_type prompt_lookup_num_tokens max_matching_ngram_size",
    ),
    _rule(
        *("stock", "how stock runs its own forward pass"),
        "compile_config disable_compile prefill_chunk_size synced_gpus continuous_batching_config",
    ),
    _rule(
        *("stock", "encoder-decoder models"),
        "encoder_repetition_penalty encoder_no_repeat_ngram_size decoder_start_token_id",
    ),
    _rule("stock", "a configuration's own bookkeeping", "transformers_version _from_model_config _commit_hash"),
)
PARAMETERS: Mapping[str, Rule] = MappingProxyType({name: rule for rule in RULES for name in rule.names})
NONE_MATTERS = frozenset(
    {"pixel_values", "pixel_values_videos", "mm_encoder_outputs"}
    | {"logits_to_keep", "next_sequence_length", "is_first_iteration"}
)
"""Arguments that stock takes for given when their value is None."""


def names(role: Role) -> frozenset[str]:
    """The parameters with this role."""
    return frozenset(name for name, rule in PARAMETERS.items() if rule.role == role)


def as_rows() -> list[dict[str, str]]:
    """The table for people, one row a rule."""
    return [
        {
            "Parameters": ", ".join(f"`{name}`" for name in rule.names),
            "Served by": "stages" if rule.served else "stock",
            "Why": rule.reason,
        }
        for rule in RULES
    ]
