"""What a process of its own takes."""

import pytest
import torch

from vlmopt.bench.models import TINY
from vlmopt.errors import VlmoptError
from vlmopt.workbook import fresh
from vlmopt.workbook.record import Record


@pytest.fixture
def record() -> Record:
    made = Record("30_static_cache", "q", "smoke", "tiny", {})
    made.check("c", "exact", 0, 0)
    return made


def test_what_optimising_takes_in_fresh_processes_is_kept(record):
    fresh.measure_load(record, str(TINY), "exact")
    rows = record.find("optimize_s", "exact")
    assert [row["case"] for row in rows] == list(fresh.LOAD_LIMITS)
    assert all(0 < row["p50"] < 20 for row in rows)


def test_a_process_that_fails_is_told_with_its_last_line():
    with pytest.raises(VlmoptError, match="a fresh process with exact failed: error: there is no model folder"):
        fresh.ask("nowhere", "exact")


def test_it_takes_a_model_and_a_preset(capsys):
    assert fresh.main(["nowhere"]) == 2 and "MODEL PRESET" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="device memory is counted here")
def test_memory_on_a_cpu_is_skipped_not_made_up(record):
    fresh.measure_memory(record, "c", str(TINY), ["stock"])
    assert [entry["what"] for entry in record.skipped] == ["peak_memory_gb"]


@pytest.mark.gpu
def test_the_peak_is_the_parameters_and_more(record):
    fresh.measure_memory(record, "c", str(TINY), ["stock", "fast"])
    assert all(0.02 < row["p50"] < 4 for row in record.find("peak_memory_gb"))
