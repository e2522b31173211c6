"""The embedded prompts are what they are said to be, and the data-set builder reads files laid out as on the hub."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from vlmopt.errors import VlmoptError
from vlmopt.serving.prompts import SOURCES, Prompt, build_prompts, embedded_prompts, load_prompts, main, save_prompts

HAN = re.compile("[\u4e00-\u9fff]")
PROMPT = Prompt("a", "question", "zh", "月亮自己会发光吗？", "不会。")


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def belle(count: int) -> list[dict]:
    return [
        {"instruction": f"问题{i}", "input": f"材料{i}" if i % 2 else "", "output": f"回答{i}"} for i in range(count)
    ]


def hc3(count: int) -> list[dict]:
    return [
        {"question": f"问{i}", "human_answers": [f"人答{i}", "另一答"], "chatgpt_answers": []} for i in range(count)
    ]


def xlsum(count: int) -> list[dict]:
    return [{"id": str(i), "url": "", "title": "", "summary": f"摘要{i}", "text": f"文章{i}"} for i in range(count)]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Rows that `datasets` converts stay in the test's own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path) -> Path:
    """The three data sets as somebody fetched them."""
    place = tmp_path / "sets"
    write_lines(place / "generated_chat_0.4M/generated_chat_0.4M.json", belle(30))
    write_lines(place / "HC3-Chinese/all.jsonl", hc3(20))
    file = place / "xlsum/chinese_simplified/test/0000.parquet"
    file.parent.mkdir(parents=True)
    datasets.Dataset.from_list(xlsum(20)).to_parquet(file)
    return place


def test_the_embedded_set_is_balanced_and_without_doubles():
    prompts = embedded_prompts()
    count = Counter((prompt.language, prompt.kind) for prompt in prompts)
    assert count.keys() == {
        (language, kind) for language in ("zh", "en") for kind in ("question", "explain", "summary")
    }
    assert min(count.values()) >= 20
    assert Counter(prompt.language for prompt in prompts) == {"zh": 62, "en": 62}
    assert len({prompt.text for prompt in prompts}) == len({prompt.reference for prompt in prompts}) == len(prompts)


def fault(prompt: Prompt) -> str | None:
    """What speaks against an embedded prompt being in its language and of its kind."""
    for text in (prompt.text, prompt.reference):
        if text != text.strip():
            return "white space at an end"
        if prompt.language == "en" and HAN.search(text):
            return "Chinese in an English prompt"
    if prompt.language == "zh" and len(HAN.findall(prompt.text)) < len(prompt.text) / 2:
        return "a Chinese prompt that is mostly not Chinese"
    passage = prompt.text.partition("\n\n")[2]
    if bool(passage) != (prompt.kind == "summary"):
        return "a passage belongs to summaries, and only to them"
    if passage and len(passage) < (150 if prompt.language == "zh" else 400):
        return "too short to be summarised"
    if passage and len(prompt.reference) > len(passage) / 2:
        return "the reference is no summary"
    if not passage and len(prompt.text) > 160:
        return "too long for its kind"
    return None


def test_the_embedded_prompts_are_in_their_language_and_of_their_kind():
    assert {prompt.id: found for prompt in embedded_prompts() if (found := fault(prompt))} == {}


@pytest.mark.parametrize(
    "change",
    [
        {"text": "月亮？ "},
        {"language": "en"},
        {"text": "Why 月?"},
        {"kind": "summary"},
        {"text": "概括\n\n短"},
        {"kind": "summary", "text": "概括\n\n短"},
        {"kind": "summary", "text": "概括\n\n" + "文" * 200, "reference": "文" * 150},
        {"text": "长" * 200},
    ],
)
def test_the_rule_for_embedded_prompts_rejects(change):
    assert fault(PROMPT) is None
    assert fault(replace(PROMPT, **change))


def test_prompts_survive_the_file(tmp_path):
    path = save_prompts(tmp_path / "p.json", [PROMPT])
    assert load_prompts(path) == (PROMPT,)
    assert "月亮" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the prompts"),
        ("{", "not JSON"),
        ("[]", "at least one"),
        ('{"a": 1}', "not a list"),
        ('[{"id": "a"}]', "prompt 0 of"),
        ("[1]", "prompt 0 of"),
        (json.dumps([{**PROMPT.__dict__, "text": 5}]), "prompt 0 of"),
        (json.dumps([PROMPT.__dict__] * 2), "one id twice"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path, content, says):
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(VlmoptError, match=says):
        load_prompts(path)


def test_the_builder_draws_from_all_three_sets(folder):
    prompts = build_prompts({"belle": 4, "hc3": 3, "xlsum": 2}, folder)
    assert Counter(prompt.kind for prompt in prompts) == {"chat": 4, "explain": 3, "summary": 2}
    assert {prompt.language for prompt in prompts} == {"zh"}
    assert len({prompt.id for prompt in prompts}) == 9
    for prompt in prompts:
        number = re.search(r"\d+", prompt.text)[0]
        expected = {
            "chat": (f"问题{number}\n材料{number}" if int(number) % 2 else f"问题{number}", f"回答{number}"),
            "explain": (f"问{number}", f"人答{number}"),
            "summary": (f"请用一两句话概括下面这篇文章的主要内容。\n\n文章{number}", f"摘要{number}"),
        }
        assert (prompt.text, prompt.reference) == expected[prompt.kind]


def test_the_command_writes_test_cases(folder, tmp_path, capsys):
    out = tmp_path / "cases.json"
    asked = [str(out), "--belle", "4", "--hc3", "0", "--xlsum", "2", "--folder", str(folder), "--seed", "1"]
    assert main(asked) == 0
    assert load_prompts(out) == build_prompts({"belle": 4, "xlsum": 2}, folder, seed=1)
    assert capsys.readouterr().out == f"6 prompts in {out}\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--belle", "9000"], "usable rows, not 9000"),
        (["--belle", "0", "--hc3", "0", "--xlsum", "0"], "at least one data set"),
    ],
)
def test_what_the_command_cannot_build_is_one_sentence_and_no_file(folder, tmp_path, capsys, options, says):
    out = tmp_path / "cases.json"
    assert main([str(out), "--folder", str(folder), *options]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and says in said[0] and not out.exists()


def test_the_seed_decides_what_is_drawn(folder):
    texts = [[p.text for p in build_prompts({"belle": 10}, folder, **seed)] for seed in ({}, {"seed": 42}, {"seed": 1})]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != [p["instruction"] for p in belle(10)]


def test_rows_without_text_or_too_long_are_passed_over(folder, tmp_path):
    bad = [{"instruction": "", "input": "", "output": "x"}, {"instruction": "x", "input": "", "output": " "}]
    bad += [{"instruction": "长" * 50, "input": "", "output": "x"}, {"instruction": "缺", "input": "", "output": None}]
    write_lines(folder / "generated_chat_0.4M/generated_chat_0.4M.json", bad + belle(3))
    assert {p.reference for p in build_prompts({"belle": 3}, folder, longest=49)} == {"回答0", "回答1", "回答2"}
    with pytest.raises(VlmoptError, match="3 usable rows, not 4"):
        build_prompts({"belle": 4}, folder, longest=49)
    assert "长" * 50 in {p.text for p in build_prompts({"belle": 4}, folder, longest=50)}
    write_lines(folder / "HC3-Chinese/all.jsonl", [{**hc3(1)[0], "human_answers": []}, *hc3(2)])
    assert len(build_prompts({"hc3": 2}, folder)) == 2
    with pytest.raises(VlmoptError, match="2 usable rows, not 3"):
        build_prompts({"hc3": 3}, folder)


def test_the_unpacked_archive_of_xlsum_is_read_too(folder):
    (folder / "xlsum/chinese_simplified/test/0000.parquet").unlink()
    write_lines(folder / "xlsum/data/chinese_simplified_train.jsonl", belle(2))
    write_lines(folder / "xlsum/data/chinese_simplified_test.jsonl", xlsum(2))
    assert {p.reference for p in build_prompts({"xlsum": 2}, folder)} == {"摘要0", "摘要1"}


def _without_folder(folder: Path) -> None:
    os.rename(folder / "HC3-Chinese", folder / "elsewhere")


def _without_file(folder: Path) -> None:
    os.rename(folder / "HC3-Chinese/all.jsonl", folder / "HC3-Chinese/all.csv")


def _without_column(folder: Path) -> None:
    write_lines(folder / "HC3-Chinese/all.jsonl", [{"question": "问"}])


def _damaged(folder: Path) -> None:
    (folder / "HC3-Chinese/all.jsonl").write_text('{"question": \n')


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_without_folder, "HC3-Chinese does not exist; fetch Hello-SimpleAI/HC3-Chinese into it"),
        (_without_file, "holds none of all.jsonl"),
        (_without_column, "lacks the column human_answers; it has question"),
        (_damaged, "cannot read the data set Hello-SimpleAI/HC3-Chinese"),
    ],
)
def test_what_is_missing_locally_is_said_in_one_sentence(folder, harm, says):
    harm(folder)
    with pytest.raises(VlmoptError, match=says) as raised:
        build_prompts({"hc3": 1}, folder)
    assert "\n" not in str(raised.value)


def test_an_unknown_set_is_refused():
    with pytest.raises(VlmoptError, match="'alpaca'; choose among belle, hc3, xlsum"):
        build_prompts({"alpaca": 1})


def test_without_a_folder_the_hub_is_asked_for_the_files_themselves(monkeypatch):
    asked = []

    def load(form, data_files, split):
        asked.append((form, *data_files, split))
        rows = {"json": belle(1) if "BelleGroup" in data_files[0] else hc3(1), "parquet": xlsum(1)}[form]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(build_prompts(dict.fromkeys(SOURCES, 1))) == 3
    assert asked == [
        ("json", "hf://datasets/BelleGroup/generated_chat_0.4M/generated_chat_0.4M.json", "train"),
        ("json", "hf://datasets/Hello-SimpleAI/HC3-Chinese/all.jsonl", "train"),
        ("parquet", "hf://datasets/csebuetnlp/xlsum@refs/convert/parquet/chinese_simplified/test/*.parquet", "train"),
    ]


def test_a_hub_that_is_out_of_reach_is_said_in_one_sentence(monkeypatch):
    def load(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(VlmoptError, match=r"from the hub \(no route\); pass a folder that holds it as xlsum$"):
        build_prompts({"xlsum": 1})
