"""models.json: what its entries say, what is refused, and what vLLM is told."""

import json
from pathlib import Path

import pytest

from vlmopt.errors import VlmoptError
from vlmopt.serving.models import (
    MODELS,
    SCHEDULER,
    ModelEntry,
    RelativeSlo,
    as_flags,
    choose,
    engine_arguments,
    load_models,
)
from vlmopt.serving.replica import Engine
from vlmopt.serving.shapes import write_shapes

ADMISSION = {"policy": "reserve"}


def folder(place: Path, **config: object) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return place


def entry_of(tmp_path: Path, config: dict | None = None, **values: object) -> ModelEntry:
    return ModelEntry(model_path=folder(tmp_path / "m", **(config or {})), **values)


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "models.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_shipped_file_shows_every_kind_of_entry():
    entries = load_models(MODELS).values()
    methods = {entry.speculative_decoding.method for entry in entries if entry.speculative_decoding}
    assert methods == {"draft_model", "ngram", "eagle3"}
    assert {entry.kv_cache_dtype for entry in entries} == {"auto", "fp8"}


def test_the_seeds_file_is_read_as_it_is(tmp_path):
    content = {
        "MiniCPM-8B-Spec": {
            "model_path": "/path/to/your/MiniCPM4-8B",
            "speculative_decoding": {"draft_model_path": "/path/to/your/MiniCPM4-0.5B", "num_speculative_tokens": 5},
        },
        "Qwen2.5-3B-Instruct": {"model_path": "Qwen2.5-3B-Instruct"},
    }
    models = load_models(written(tmp_path, content))
    assert list(models) == list(content)
    spec = models["MiniCPM-8B-Spec"]
    assert spec.speculative_decoding.method == "draft_model"
    assert spec.slo == 30.0 and spec.load_format == "auto"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_pat": "m"}, "nearest is 'model_path'"),
        ({}, "model_path: Field required"),
        ({"model_path": "m", "slo": 0}, "slo is in seconds"),
        ({"model_path": "m", "slo": "soon"}, "slo"),
        ({"model_path": "m", "slo": {"times_unloaded": -1}}, "times_unloaded"),
        ({"model_path": "m", "kv_cache_dtype": "fp9"}, "kv_cache_dtype"),
        ({"model_path": "m", "max_tokens": 0}, "max_tokens"),
        ({"model_path": "m", "engine": {"scheduler_cls": "x"}}, "scheduler_cls cannot stand in 'engine'"),
        ({"model_path": "m", "speculative_decoding": {"num_speculative_tokens": 5}}, "needs a draft_model_path"),
        ({"model_path": "m", "speculative_decoding": {"draft_model_path": "d"}}, "num_speculative_tokens"),
        (
            {"model_path": "m", "speculative_decoding": {"method": "eagle3", "num_speculative_tokens": 3}},
            "'eagle3' needs a draft_model_path",
        ),
        (
            {
                "model_path": "m",
                "speculative_decoding": {"method": "ngram", "num_speculative_tokens": 3, "draft_model_path": "d"},
            },
            "'ngram' takes no draft_model_path",
        ),
        (
            {
                "model_path": "m",
                "speculative_decoding": {"num_speculative_tokens": 3, "draft_model_path": "d", "prompt_lookup_max": 4},
            },
            "are for the method 'ngram'",
        ),
    ],
)
def test_a_bad_entry_is_refused_in_one_sentence_that_names_it(tmp_path, values, says):
    with pytest.raises(VlmoptError) as caught:
        load_models(written(tmp_path, {"mine": values}))
    message = str(caught.value)
    assert "mine" in message and says in message and "\n" not in message


@pytest.mark.parametrize(("content", "says"), [(None, "cannot read"), ("{", "not JSON"), ("[]", "at least one")])
def test_a_file_without_models_is_refused(tmp_path, content, says):
    path = tmp_path / "none.json" if content is None else written(tmp_path, content)
    with pytest.raises(VlmoptError, match=says):
        load_models(path)


def test_models_are_chosen_by_name_and_must_be_there(tmp_path):
    here = {"model_path": str(folder(tmp_path / "here"))}
    draft = {"draft_model_path": str(tmp_path / "gone"), "num_speculative_tokens": 2}
    models = load_models(written(tmp_path, {"here": here, "half": {**here, "speculative_decoding": draft}}))
    assert list(choose(models, ["here"])) == ["here"]
    with pytest.raises(VlmoptError, match="nearest is 'here'"):
        choose(models, ["her"])
    with pytest.raises(VlmoptError, match=r"gone \(of half\)"):
        choose(models, None)


def test_a_plain_text_model(tmp_path):
    made = engine_arguments(entry_of(tmp_path), ADMISSION)
    assert made == {
        "model": str(tmp_path / "m"),
        "load_format": "auto",
        "kv_cache_dtype": "auto",
        "scheduler_cls": SCHEDULER,
        "additional_config": {"vlmopt": ADMISSION},
    }


def test_a_vision_model_takes_one_image_unless_its_entry_says_otherwise(tmp_path):
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}}
    assert engine_arguments(entry_of(tmp_path, config), ADMISSION)["limit_mm_per_prompt"] == {"image": 1, "video": 0}
    more = entry_of(tmp_path, config, engine={"limit_mm_per_prompt": {"image": 4}})
    assert engine_arguments(more, ADMISSION)["limit_mm_per_prompt"] == {"image": 4}


@pytest.mark.parametrize(
    ("speculation", "told"),
    [
        (
            {"draft_model_path": "d", "num_speculative_tokens": 5},
            {"method": "draft_model", "model": "d", "num_speculative_tokens": 5},
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        ),
        (
            {"method": "eagle3", "draft_model_path": "e", "num_speculative_tokens": 3},
            {"method": "eagle3", "model": "e", "num_speculative_tokens": 3},
        ),
    ],
)
def test_speculation_is_told_to_vllm_and_can_be_left_out(tmp_path, speculation, told):
    entry = entry_of(tmp_path, speculative_decoding=speculation)
    assert engine_arguments(entry, ADMISSION)["speculative_config"] == told
    assert "speculative_config" not in engine_arguments(entry, ADMISSION, speculate=False)


def test_cache_type_weights_back_end_and_further_arguments_are_told(tmp_path):
    entry = entry_of(tmp_path, kv_cache_dtype="fp8", load_format="dummy", engine={"max_model_len": 4096})
    made = engine_arguments(entry, ADMISSION, attention_backend="flashinfer")
    assert (made["kv_cache_dtype"], made["load_format"], made["max_model_len"]) == ("fp8", "dummy", 4096)
    assert made["attention_backend"] == "FLASHINFER"


def test_a_relative_objective_is_read():
    assert ModelEntry(model_path="m", slo={"times_unloaded": 3}).slo == RelativeSlo(times_unloaded=3)


def test_flags_of_the_server():
    arguments = {
        "model": "m",
        "max_model_len": 8,
        "enforce_eager": True,
        "x_y": False,
        "c": {"a": 1},
        "names": ["a", 2],
    }
    assert as_flags(arguments) == [
        *("--model", "m", "--max-model-len", "8", "--enforce-eager", "--no-x-y"),
        *("--c", '{"a": 1}', "--names", "a", "2"),
    ]


def test_the_shapes_are_models_that_an_engine_takes(tmp_path):
    models = choose(load_models(write_shapes(tmp_path)), None)
    assert {"8B", "8B-fp8", "3B", "2B-VL"} <= models.keys()
    assert {name for name, entry in models.items() if entry.has_vision()} == {"2B-VL"}
    bf16, fp8 = (models[name].engine["num_gpu_blocks_override"] - 1 for name in ("8B", "8B-fp8"))
    assert fp8 // bf16 == 2, "the same bytes"
    limits = [models["8B"].engine[name] for name in ("max_num_seqs", "max_num_batched_tokens")]
    assert limits == [Engine.max_running, Engine.budget], "as the simulator's"
    config = json.loads((tmp_path / "2B-VL" / "config.json").read_bytes())
    tokens = json.loads((tmp_path / "2B-VL" / "tokenizer.json").read_bytes())["added_tokens"]
    assert config["image_token_id"] in [token["id"] for token in tokens if token["content"] == "<|image_pad|>"]
