"""Every parameter of `generate`: stock's result or exception for a value of weight, counted as the registry says."""

import copy
import inspect
from types import FunctionType

import pytest
import torch
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    Qwen3VLForConditionalGeneration,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from vlmopt.runtime.contract import PARAMETERS, RULES, names
from vlmopt.runtime.stock import NEUTRAL
from vlmopt.tests.contract.compare import both, outcome, same, served

BASE = {"max_new_tokens": 4, "do_sample": False}
NOT_PARAMETERS = {"self", "kwargs"}


class Words:
    """A streamer that forgets."""

    def put(self, value):
        pass

    def end(self):
        pass


def late(ids, scores):
    return torch.full((len(ids),), ids.shape[1] > 75)


# Options by name; a lambda makes one of (model, inputs). The neutral value would test nothing.
VALUES = {
    "max_new_tokens": [1, 3, 0, -1, 2.5],
    "max_length": [1000, 3],
    "eos_token_id": [[258, 65, 66], None, 32, [], torch.tensor([32, 101])],
    "pad_token_id": [0, None, -1],
    "bos_token_id": [3, None],
    "do_sample": [True, None, 1],
    "use_cache": [False, None],
    "generation_config": [GenerationConfig(max_new_tokens=2), GenerationConfig(num_beams=2), {"max_new_tokens": 2}],
    "streamer": [lambda model, inputs: Words()],
    "repetition_penalty": [1.5, -1.0, None, "much"],
    "no_repeat_ngram_size": [2, None],
    "suppress_tokens": [[0, 32, 101], torch.tensor([0, 32])],
    "remove_invalid_values": [True, None],
    "renormalize_logits": [True],
    "pixel_values_videos": [lambda model, inputs: inputs["pixel_values"]],
    "video_grid_thw": [torch.tensor([[1, 4, 4]])],
    "inputs_embeds": [lambda model, inputs: model.get_input_embeddings()(inputs["input_ids"])],
    "position_ids": [lambda model, inputs: torch.arange(inputs["input_ids"].shape[1])[None] * 2],
    "mm_encoder_outputs": [{}],
    "labels": [lambda model, inputs: inputs["input_ids"]],
    "logits_to_keep": [2],
    "cache": [lambda model, inputs: DynamicCache(config=model.config.text_config)],
    "past_key_values": [lambda model, inputs: DynamicCache(config=model.config.text_config)],
    "cache_params": [lambda model, inputs: DynamicCache(config=model.config.text_config)],
    "cache_implementation": ["static", "offloaded", "no such cache"],
    "cache_config": [{"backend": "quanto"}],
    "max_cache_len": [300],
    "next_sequence_length": [1],
    "is_first_iteration": [True],
    "num_beams": [2, None, 0],
    "num_beam_groups": [2],
    "num_return_sequences": [2, 0, None],
    "length_penalty": [2.0],
    "early_stopping": [True, "perhaps"],
    "diversity_penalty": [0.5],
    "constraints": [[object()]],
    "force_words_ids": [[[70]]],
    "low_memory": [True],
    "logits_processor": [LogitsProcessorList([MinLengthLogitsProcessor(120, 258)])],
    "prefix_allowed_tokens_fn": [lambda model, inputs: lambda batch, ids: [70, 71]],
    "stopping_criteria": [StoppingCriteriaList([late])],
    "custom_generate": [lambda model, inputs: lambda model, input_ids, **kwargs: input_ids[:, :2]],
    "trust_remote_code": [True],
    "stop_strings": ["a"],
    "tokenizer": [object()],
    "max_time": [60.0],
    "min_length": [90],
    "min_new_tokens": [4],
    "bad_words_ids": [[[65], [256]], "none"],
    "sequence_bias": [[[[65], 4.0]]],
    "forced_bos_token_id": [65],
    "forced_eos_token_id": [258],
    "begin_suppress_tokens": [[65, 83]],
    "exponential_decay_length_penalty": [(1, 2.0)],
    "token_healing": [True],
    "watermarking_config": [WatermarkingConfig(), {"bias": 2.5}],
    "guidance_scale": [2.0],
    "negative_prompt_ids": [torch.tensor([[1, 2, 3]])],
    "negative_prompt_attention_mask": [torch.tensor([[1, 1, 1]])],
    "penalty_alpha": [0.6],
    "dola_layers": ["low"],
    "return_dict_in_generate": [True],
    "output_scores": [True],
    "output_logits": [True],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "assistant_model": [lambda model, inputs: copy.deepcopy(model)],
    "assistant_tokenizer": [object()],
    "is_assistant": [True],
    "use_mtp": [True],
    "num_assistant_tokens": [3],
    "num_assistant_tokens_schedule": ["heuristic"],
    "assistant_confidence_threshold": [0.1],
    "assistant_early_exit": [2],
    "assistant_lookbehind": [3],
    "target_lookbehind": [3],
    "assistant_ensemble_weight": [0.5, 2.0],
    "speculation_type": ["dflash"],
    "prompt_lookup_num_tokens": [3],
    "max_matching_ngram_size": [2],
    "compile_config": [CompileConfig(), {}],
    "disable_compile": [True],
    "prefill_chunk_size": [16],
    "synced_gpus": [True],
    "continuous_batching_config": [ContinuousBatchingConfig()],
    "encoder_repetition_penalty": [1.5],
    "encoder_no_repeat_ngram_size": [2],
    "decoder_start_token_id": [3],
    "transformers_version": ["4.0"],
    "_from_model_config": [True],
    "_commit_hash": ["0123456"],
}
# Values of sampling options, tried with and without sampling.
DRAWS = {
    "temperature": [2.5, 0.0, -1.0, None, "hot"],
    "top_k": [3, 0, -1, None, 2.5],
    "top_p": [0.4, 1.5, None],
    "min_p": [0.2, 2.0],
    "top_h": [0.5, -1.0],
    "typical_p": [0.5, 7.0, None],
    "epsilon_cutoff": [0.01, 3.0],
    "eta_cutoff": [0.01, None],
}
CASES = [(name, index) for name, values in VALUES.items() for index in range(len(values))]


def call(model, inputs, name, value):
    """One call with its own copy of the value, since stock writes into some."""
    value = value(model, inputs) if isinstance(value, FunctionType) else copy.deepcopy(value)
    options = {**BASE, name: value}
    if name == "max_length":
        del options["max_new_tokens"]
    if name == "inputs_embeds":
        inputs = {"attention_mask": inputs["attention_mask"]}
    return model.generate(**inputs, **options)


def known_to_transformers() -> set[str]:
    """Every name that `generate` takes: its own, the configuration's, and those that go on to the model."""
    sources = (
        GenerationMixin.generate,
        Qwen3VLForConditionalGeneration.forward,
        Qwen3VLForConditionalGeneration.prepare_inputs_for_generation,
    )
    found = {name for source in sources for name in inspect.signature(source).parameters}
    return (found | set(vars(GenerationConfig())) | set(NEUTRAL)) - NOT_PARAMETERS


def test_the_registry_holds_every_parameter_once():
    assert known_to_transformers() <= set(PARAMETERS), (
        "transformers has a parameter of which the registry knows nothing"
    )
    assert len(PARAMETERS) == sum(len(rule.names) for rule in RULES)
    assert set(VALUES) | set(DRAWS) | names("input") == set(PARAMETERS)
    assert set(DRAWS) == names("draws")


@pytest.mark.parametrize(("name", "index"), CASES, ids=lambda value: str(value))
def test_a_value_of_weight_gives_stocks_result_or_exception(ours, stock, prompt, name, index):
    inputs, value = prompt((64, 96), "what is it?"), VALUES[name][index]
    mine, theirs = (outcome(lambda model=model: call(model, inputs, name, value)) for model in (ours, stock))
    assert same(mine, theirs), (mine, theirs)
    assert sum(served(ours).values()) == 1
    if not PARAMETERS[name].served:
        assert served(ours) == {"stock": 1}
    elif index == 0 and name != "use_cache":
        assert served(ours) == {"stages": 1}


@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - {"inputs"}))
def test_none_said_aloud_is_what_it_is_to_stock(ours, stock, prompt, name):
    for inputs in (prompt("text"), prompt((64, 96), "image")):
        mine, theirs = both(ours, stock, {**inputs, **BASE, "max_new_tokens": 2, name: None})
        assert same(mine, theirs), (mine, theirs)


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in DRAWS.items() for value in values])
def test_a_sampling_option_gives_stocks_draws_or_is_ignored_as_stock_does(ours, stock, prompt, name, value, sampling):
    options = {**BASE, "do_sample": sampling, name: value}
    mine, theirs = both(ours, stock, prompt((64, 96), "what is it?"), **options)
    assert same(mine, theirs)
    assert served(ours) == {"stages" if torch.is_tensor(theirs) else "stock": 1}


def test_a_parameter_that_nobody_knows_goes_to_stock(ours, stock, prompt):
    mine, theirs = both(ours, stock, prompt("hello"), **BASE, brand_new=3)
    assert mine is theirs is ValueError
    assert served(ours) == {"stock": 1}
