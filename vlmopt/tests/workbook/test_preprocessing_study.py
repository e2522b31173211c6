"""The study of preprocessing: its checks can fail, and its path on a GPU runs with a CPU in the GPU's place."""

from dataclasses import replace

import pytest
import torch

import vlmopt
from vlmopt.bench import models
from vlmopt.errors import VlmoptError
from vlmopt.workbook import end_to_end, figures
from vlmopt.workbook import preprocessing_study as study
from vlmopt.workbook.record import Record, Roof

SIZE = (64, 96)
LIMITS = Roof(1e9)


class PretendedGPU(study.Ways):
    """Takes a GPU's paths on the CPU, where our processor runs the kernel's reference."""

    @property
    def on_gpu(self) -> bool:
        return True


@pytest.fixture(scope="module")
def ways():
    if torch.cuda.is_available():
        pytest.skip("the notebook itself runs on a GPU; here a CPU stands in for it")
    return study.ways()


@pytest.fixture
def gpu(ways):
    return PretendedGPU(ways.device, ways.stock, ways.own)


@pytest.fixture
def record():
    return Record("34_preprocessing", "?", "full", "tiny", {"device": "cpu", "torch": "2"})


@pytest.fixture
def checked(record):
    record.check("c", "exact", 0, 0)
    return record


def few(seed=0):
    return {name: image for name, image in study.pictures(seed).items() if image.height == 64}


def test_the_pictures_are_of_every_kind():
    found = study.pictures(0)
    assert {image.mode for image in found.values()} == set(study.MODES)
    assert {(image.height, image.width) for image in found.values()} == set(study.CHECKED)


def test_the_checks_pass_twice_and_fail_for_other_pixels_grids_and_ids(ways, record):
    for _ in range(2):
        for check in study.checks(ways, few()):
            record.check(*check)
    stock, right = ways.stock, ways.own.image_processor.kernel
    wrong_pixel = lambda *args: right(*args) + (torch.arange(1536) == 7) / 127.5  # noqa: E731
    images = study.own.Qwen2VLImageProcessor.of(stock.image_processor, ways.device, wrong_pixel)
    moved = study.checks(replace(ways, own=study.own.with_images(stock, images)), few())
    assert moved[1][2] == pytest.approx(1, abs=1e-3)
    with pytest.raises(VlmoptError, match="largest difference"):
        record.check(*moved[1])
    images = study.own.Qwen2VLImageProcessor.of(stock.image_processor, ways.device, study.patchify_ref)
    images.size = {"shortest_edge": 1024, "longest_edge": 4096}
    other = study.checks(replace(ways, own=study.own.with_images(stock, images)), few())
    assert other[0][2] > 0 and other[1][2] == float("inf")
    images.do_resize = False
    assert study.checks(replace(ways, own=study.own.with_images(stock, images)), few())[2][2] == len(few())


def test_floating_point_moves_sharp_edges(ways, checked):
    study.measure_levels(checked, ways, few())
    assert checked.find(study.LEVELS)[0]["p50"] > 1
    assert any(study.ON_DEVICE in entry["what"] for entry in checked.skipped)


def test_the_steps_are_stocks(ways, checked):
    image = few()["RGB 64x96"]
    study.measure_steps(checked, ways, image, rounds=1)
    names = [row["provider"] for row in checked.find(study.STEP)]
    assert names == [*(name for name, _ in study.stock_steps(ways, image)), "everything else"]
    *_, (_, patchify), (_, tokenise) = study.stock_steps(ways, image)
    expected = study.inputs(ways.stock, image, ways.device)
    assert torch.equal(patchify()[0][0], expected["pixel_values"])
    visual = expected["input_ids"][0] == ways.stock.image_token_id
    assert tokenise()["input_ids"].shape[1] == visual.sum()


def test_the_path_on_a_gpu(gpu, checked, monkeypatch):
    monkeypatch.setattr(study, "PREDICTED_MS", {SIZE: 1.0})
    study.predict(checked, gpu, [SIZE])
    study.measure_levels(checked, gpu, few())
    assert checked.value(study.LEVELS, study.ON_DEVICE) == 0, "here stock's own device is the CPU"
    study.measure_drafts(checked, gpu, few()["RGB 64x96"], rounds=1)
    study.measure_ways(checked, gpu, [SIZE], rounds=2, seed=0, limits=LIMITS)
    found = {row["provider"] for row in checked.find(study.MS)}
    assert found == {study.STOCK, study.ON_DEVICE, study.OWN}
    study.settle(checked, gpu, [SIZE])
    assert checked.predictions[0]["measured"] == checked.value(study.MS, study.OWN, study.default_case(checked, SIZE))
    answer, verdict = study.conclude(checked, gpu, SIZE)
    assert "with `device=`" in answer and "64x96" in answer and verdict
    assert [entry["what"] for entry in checked.lost][-1].startswith("half the patch embedding")
    assert list(figures.of(checked)) == ["34_preprocessing"]


def test_on_a_cpu_the_host_part_is_timed_and_the_effect_skipped(ways, checked, monkeypatch):
    monkeypatch.setattr(study, "PREDICTED_TIMES", {SIZE: 1.0})
    study.predict(checked, ways, [SIZE])
    study.measure_levels(checked, ways, few())
    study.measure_ways(checked, ways, [SIZE], rounds=1, seed=0, limits=LIMITS)
    study.measure_effect(checked, models.load(models.TINY, "cpu"), end_to_end.synthetic_sample(*SIZE, 0), rounds=1)
    assert not checked.find("ttft_with_preprocessing_ms") and "needs preset fast" in checked.skipped[-1]["reason"]
    study.settle(checked, ways, [SIZE])
    assert checked.predictions[0]["measured"] > 0
    assert "but the kernel, which needs a GPU" in study.conclude(checked, ways, SIZE)[0]
    assert study.one(ways, *SIZE)["provider"] == study.HOST


def test_the_effect_is_the_same_preset_with_either_processor(gpu, checked, monkeypatch):
    """`exact` stands for `fast`, and our processor for the one that a GPU would get."""
    base = models.load(models.TINY, "cpu")
    real = end_to_end.contenders

    def contenders(base, presets, record):
        field = real(base, ["exact"], record)
        exact = field.pop("exact")
        return {**field, "fast": replace(exact, target=replace(exact.target, processor=gpu.own))}

    monkeypatch.setattr(end_to_end, "contenders", contenders)
    before = gpu.own.image_processor.calls["device"]
    study.measure_effect(checked, base, end_to_end.synthetic_sample(*SIZE, 0), rounds=2)
    rows = checked.find("ttft_with_preprocessing_ms")
    assert {row["provider"] for row in rows} == {study.STOCK, "fast", study.BORROWED}
    assert gpu.own.image_processor.calls["device"] - before == 3, "one to warm up, two measured"
    study.predict(checked, gpu, [])
    study.settle(checked, gpu, [])
    assert checked.predictions[0]["measured"] is not None


def test_notebook_61_gives_ours_the_processor_that_its_preset_asks_for(monkeypatch):
    base = models.load(models.TINY, "cpu")
    made = []
    on = vlmopt.Part("preprocessing", "on", "", "exact")
    monkeypatch.setattr(end_to_end.vlmopt, "optimize", lambda model, preset: vlmopt.Status(True, None, "exact", [on]))
    monkeypatch.setattr(end_to_end, "on_device", lambda *args: made.append(args) or "ours")
    field = end_to_end.contenders(base, ["fast"], Record("x", "?", "smoke", "tiny", {}))
    assert field["fast"].target.processor == "ours" and field["stock"].target.processor is base.processor
    assert made == [(base.processor, base.device)]
