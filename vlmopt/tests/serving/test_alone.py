"""vLLM one request at a time, with a made-up vLLM: what is asked of it, and what the result file holds."""

import importlib
import json
import sys
import types

import pytest

STEP, FIRST = 0.001, 0.004


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, object]]:
    """The numbers of tokens and the images that a vLLM on a clock of its own was asked for."""
    found, clock = [], [0.0]

    class Tokenizer:
        def apply_chat_template(self, messages, **options):
            return f"<{messages[0]['content'][1]['text']}>"

    class LLM:
        def __init__(self, **settings):
            scheduler = types.SimpleNamespace(async_scheduling=settings.get("async_scheduling", True))
            config = types.SimpleNamespace(scheduler_config=scheduler)
            self.llm_engine = types.SimpleNamespace(vllm_config=config, engine_core=types.SimpleNamespace())

        def get_tokenizer(self):
            return Tokenizer()

        def generate(self, prompt, params, use_tqdm):
            found.append((params.max_tokens, prompt["multi_modal_data"]["image"]))
            clock[0] += FIRST + STEP * (params.max_tokens - 1)
            answer = types.SimpleNamespace(token_ids=[7] * params.max_tokens)
            return [types.SimpleNamespace(outputs=[answer], prompt_token_ids=[1] * 798)]

    made = types.ModuleType("vllm")
    made.LLM, made.SamplingParams = LLM, types.SimpleNamespace
    version = types.ModuleType("vllm.version")
    version.__version__ = "0.26.0"
    monkeypatch.setitem(sys.modules, "vllm", made)
    monkeypatch.setitem(sys.modules, "vllm.version", version)
    monkeypatch.delitem(sys.modules, "vlmopt.serving.alone", raising=False)
    alone = importlib.import_module("vlmopt.serving.alone")
    monkeypatch.setattr(alone.time, "perf_counter", lambda: clock[0])
    yield found
    sys.modules.pop("vlmopt.serving.alone", None)


def run(tmp_path, *flags: str) -> dict:
    path = tmp_path / "alone.json"
    assert sys.modules["vlmopt.serving.alone"].main([str(tmp_path), "--output", str(path), *flags]) == 0
    return json.loads(path.read_text())


def test_first_tokens_and_whole_answers_are_timed_about_images_that_differ(asked, tmp_path, capsys):
    result = run(tmp_path, "--engine", '{"async_scheduling": false}')
    assert result["ttft_ms"] == pytest.approx([4.0] * 15) and result["total_ms"] == pytest.approx([131.0] * 9)
    assert (result["prompt_tokens"], result["tokens"], result["async_scheduling"]) == (798, 128, False)
    assert result["environment"]["vllm"] == "0.26.0" and not result["in_process"] and "gpu_ms_per_token" not in result
    assert len({image.tobytes() for _, image in asked}) == len(asked) == 4 + 15 + 9
    assert all(image.size == (1024, 768) for _, image in asked)
    assert "first token 4.0 ms, then 1.000 ms a token" in capsys.readouterr().out


def test_an_answer_of_another_length_is_no_measurement(asked, tmp_path, monkeypatch):
    alone = sys.modules["vlmopt.serving.alone"]
    monkeypatch.setattr(alone, "SamplingParams", lambda **words: types.SimpleNamespace(**{**words, "max_tokens": 3}))
    with pytest.raises(RuntimeError, match="vLLM gave 3 tokens where 128 were asked for"):
        run(tmp_path)
    assert not (tmp_path / "alone.json").exists()


def test_what_the_gpu_works_is_a_difference_of_two_answers(asked, monkeypatch):
    alone, given = sys.modules["vlmopt.serving.alone"], []
    monkeypatch.setattr(alone, "_gpu_ms", lambda ask, tokens: (given.append(tokens), 2.0 + 0.5 * tokens)[1])
    assert alone.gpu_ms_per_token(None) == pytest.approx(0.5) and given == [65, 1]
