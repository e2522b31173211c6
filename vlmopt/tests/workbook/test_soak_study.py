"""The soak: the same requests at the beginning and the end, and a verdict that can be wrong."""

import json
from random import Random

import pytest

import vlmopt
from vlmopt import OptimizeConfig, VlmoptError
from vlmopt.bench.models import TINY
from vlmopt.workbook import report, soak_study


def quiet(items, **words):
    return items


def size(call: soak_study.Call) -> tuple[int, int, int, int]:
    pixels = sum(height * width for sides in call.images for height, width in sides)
    return len(call.images), pixels, call.letters, call.options["max_new_tokens"]


def test_the_compared_requests_come_again_at_the_end():
    drawn = soak_study.calls(400, seed=1)
    assert len(drawn) == 400 and drawn[40:140] == drawn[300:] and drawn == soak_study.calls(400, seed=1)
    assert drawn[:40] != soak_study.calls(400, seed=2)[:40]
    assert max(map(size, drawn)) == size(drawn[0]) and max(size(c) for c in drawn if len(c.images) == 1) == size(
        drawn[1]
    )
    kinds = [soak_study.draw(Random(i)) for i in range(200)]
    assert {len(call.images) for call in kinds} == {1, 2} and {call.options["do_sample"] for call in kinds} == {
        True,
        False,
    }


def test_a_study_is_written_read_and_shown(tiny, tmp_path, make_record, monkeypatch):
    small = soak_study.Call((((40, 60),),), 5, {"max_new_tokens": 2, "do_sample": False})
    several = soak_study.Call(((), ((32, 32), (50, 20))), 5, {"max_new_tokens": 1, "do_sample": False})
    monkeypatch.setattr(soak_study, "draw", lambda rng: several if rng.random() < 0.2 else small)
    monkeypatch.setattr(soak_study, "SIDE", 90)
    monkeypatch.setattr(soak_study, "SLOWER", 50)  # a busy machine is no fault of the model
    vlmopt.optimize(tiny.model, OptimizeConfig.preset("exact", batches=True))
    found = soak_study.study(tiny, 40, 0, quiet)
    soak_study.require(found)
    assert (found["requests"], found["served"], found["handed_to_stock"]) == (40, 40, 0)
    assert found["levels"][-1]["requests"] == 40 and found["levels"][-1]["grid_tables"] == 3
    path = soak_study.write(found, tiny, tmp_path)
    vlmopt.revert(tiny.model)
    assert path == tmp_path / "cpu" / "soak.json" and soak_study.read(path)["last_ms"] == found["last_ms"]
    record = make_record()
    record.environment["device"] = "cpu"
    record.save(tmp_path)
    text = report.assemble([tmp_path], tmp_path)
    assert "### The soak" in text and "40 served by the stages, 0 handed to stock" in text


LEVEL = {"requests": 1, "device_mb": 10.0, "host_mb": 1.0, "graphs": 2, "grid_tables": 1, "cache_rows": 8}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"levels": [LEVEL, {**LEVEL, "device_mb": 27.0}, LEVEL]}, "17[.]0 MB more are held"),
        ({"levels": [LEVEL, {**LEVEL, "graphs": 17}]}, "17 graphs"),
        ({"last_to_first": 1.06}, "1[.]06 times what the same took"),
    ],
)
def test_what_grows_or_slows_down_is_refused(change, says):
    good = {"levels": [LEVEL, {**LEVEL, "device_mb": 26.0, "graphs": 16}], "last_to_first": 1.05}
    soak_study.require(good)
    with pytest.raises(VlmoptError, match=says):
        soak_study.require({**good, **change})


def test_a_file_that_is_no_record_is_refused(tmp_path):
    path = tmp_path / "soak.json"
    for content in ("{", "{}", json.dumps({"levels": []})):
        path.write_text(content)
        with pytest.raises(VlmoptError, match="run soak_study again"):
            soak_study.read(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--requests", "5"], "fewer than 40"), (["--model", "nowhere"], "nowhere"), (["--preset", "x"], "x")],
)
def test_the_command_says_in_one_sentence_what_it_cannot_do(options, says, tmp_path, capsys):
    assert TINY.is_dir()
    assert soak_study.main([*options, "--output", str(tmp_path)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and says in said[0]
