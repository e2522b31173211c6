"""The study of a cache in eight bits: what is told of its steps, and that a CPU skips them."""

import pytest
import torch

from vlmopt.bench import models
from vlmopt.workbook import kv_study, quant_bench, quant_variants
from vlmopt.workbook.decode_study import METRIC, at
from vlmopt.workbook.kernel_study import Bench
from vlmopt.workbook.record import Record, Roof

CPU = Bench(torch.device("cpu"), torch.float32, "smoke", Roof(1e10), (1.0,))
GPU = Bench(torch.device("cuda"), torch.bfloat16, "full", Roof(4.6e12), (2.0,))


@pytest.fixture
def record():
    found = Record("40_quantization", "?", "smoke", "tiny", {"device": "cpu", "torch": "2"})
    found.check("a check", "near", 0, 1)
    return found


def test_on_a_cpu_steps_are_skipped_with_the_reason(record, reference):
    assert kv_study.predictions(CPU) == []
    kv_study.measure(record, reference, CPU)
    kv_study.settle(record)
    assert [skip["reason"] for skip in record.skipped] == ["there is no GPU to time them on"]
    assert kv_study.told(record) == ""


def test_predictions_are_settled_and_told(record, monkeypatch):
    monkeypatch.setattr(quant_bench, "has_ring", lambda bench: False)
    predicted = kv_study.predictions(GPU)
    assert [ms for _, ms, _ in predicted] == list(kv_study.PREDICTED_MS.values())
    assert predicted[0] in quant_bench.predictions(GPU)
    for prediction in predicted:
        record.predict(*prediction)
    for i, row in enumerate(kv_study.POSITIONS):
        for name, ms in ((kv_study.PLAIN, 1.0 + i), (kv_study.EIGHT, 1.5 + i / 2)):
            record.measure(at("random-2b", row), name, METRIC, "ms", [ms])
    kv_study.settle(record)
    assert [prediction["measured"] for prediction in record.predictions] == [1.5, 2, 2.5]
    assert [draft["lesson"] for draft in record.lost] == [
        "1.5 ms against 1; they save memory",
        "2 ms against 2; they save memory",
    ]
    expected = "1.5 ms (random-2b at 1,024, `fast` 1), 2 ms (random-2b at 16,384, `fast` 2), 2.5 ms"
    assert kv_study.told(record).startswith(f" A step over keys and values in e4m3: {expected}")
    for name in (quant_variants.NONE, quant_variants.KV):
        record.measure("tiny, 4 samples", name, "accuracy", "share", [1.0])
        record.measure("tiny, 4 samples", name, "bytes_per_token", "B", [1])
    assert "Keys and values in e4m3: no accuracy lost. A step" in quant_bench.conclude(record)[0]


@pytest.mark.gpu
def test_on_a_gpu_both_caches_are_timed(record):
    bench = Bench(torch.device("cuda"), torch.bfloat16, "smoke", Roof(4.6e12), (2.0,))
    kv_study.measure(record, models.load(models.TINY, "cuda"), bench, positions=(100, 1000))
    for name in kv_study.DTYPES:
        assert len(record.find(METRIC, name)) == 2 and record.value("cache_gb", name) > 0
    assert record.value("cache_gb", kv_study.PLAIN) == 2 * record.value("cache_gb", kv_study.EIGHT)
