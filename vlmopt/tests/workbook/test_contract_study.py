"""The study of random conversations: reproducible cases, verdicts that can be wrong, a record that adds up."""

import copy
import json
from dataclasses import replace
from random import Random

import pytest
import torch

import vlmopt
from vlmopt import OptimizeConfig, VlmoptError
from vlmopt.bench.models import TINY, load
from vlmopt.workbook import contract_study, report
from vlmopt.workbook.conversations import PLAIN, draw, prepare

SERVING = OptimizeConfig.preset("exact", batches=True)


@pytest.fixture
def serving(tiny):
    vlmopt.optimize(tiny.model, SERVING)
    return tiny.model


def test_a_number_names_the_same_case_everywhere(reference):
    first, again = (contract_study.case_of(3, 14, sampling=True) for _ in range(2))
    other = contract_study.case_of(3, 15, sampling=True)
    texts = [json.dumps(case.chats, default=lambda image: image.tobytes().hex()) for case in (first, again, other)]
    assert texts[0] == texts[1] != texts[2] and first.options == again.options


def test_without_sampling_nothing_is_drawn():
    cases = [draw(Random(i), sampling=False) for i in range(60)]
    assert not any(case.options["do_sample"] for case in cases)
    assert any(draw(Random(i), sampling=True).options["do_sample"] for i in range(60))


def quiet(items, **words):
    return items


def test_a_study_counts_and_is_written_read_and_shown(serving, reference, tmp_path, make_record):
    rows, differing = contract_study.study(reference, serving, 25, 0, quiet)
    contract_study.require(rows, differing, 0)
    assert sum(row["cases"] for row in rows) == 25
    assert all(row["served"] + row["handed_to_stock"] == row["cases"] for row in rows)
    path = contract_study.write(rows, reference, vlmopt.status(serving), 0, tmp_path)
    assert path == tmp_path / "cpu" / "contract.json"
    assert contract_study.read(path)["cases"] == 25
    record = make_record()
    record.environment["device"] = "cpu"
    record.save(tmp_path)
    text = report.assemble([tmp_path], tmp_path)
    assert "### The contract" in text and "The stages served 100.0% of the plain" in text
    assert "| all | 25 |" in text


def test_a_record_that_does_not_add_up_is_refused(tmp_path):
    rows = [{"kind": PLAIN, "cases": 3, "served": 3, "handed_to_stock": 0, "near_ties": 0, "differences": 0}]
    status = vlmopt.Status(True, SERVING, "near")
    path = contract_study.write(rows, load(TINY, "cpu"), status, 0, tmp_path)
    content = json.loads(path.read_text())
    for broken in ({**content, "differences": 1}, {**content, "kinds": None}, {"kinds": []}):
        path.write_text(json.dumps(broken))
        with pytest.raises(VlmoptError, match="run contract_study again"):
            contract_study.read(path)


def test_a_wrong_model_is_found_out_and_its_cases_are_named(reference):
    wrong = load(TINY, "cpu", torch.float32).model
    with torch.no_grad():
        wrong.model.language_model.norm.weight.mul_(-1)
    rows, differing = contract_study.study(reference, wrong, 6, 0, quiet)
    assert differing
    with pytest.raises(VlmoptError, match=rf"case_of\(0, number\) for the numbers {differing[0]}"):
        contract_study.require(rows, differing, 0)


def test_too_few_served_is_refused(reference):
    """Stock beside itself: nothing differs, and nothing is served."""
    rows, differing = contract_study.study(reference, copy.deepcopy(reference.model), 6, 0, quiet)
    assert not differing
    with pytest.raises(VlmoptError, match=r"served 0.0% of the plain cases"):
        contract_study.require(rows, differing, 0)


def test_only_a_difference_within_stocks_own_error_is_a_near_tie(reference):
    stock = load(TINY, "cpu", torch.bfloat16)
    prompt = next(case for case in map(plain_case, range(50)) if "image_grid_thw" in prepared(stock, case))
    inputs = prepared(stock, prompt)
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    answer = stock.model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    more = contract_study.extended(inputs, answer[:2])
    exact = reference.model(**more).logits[0, -1]
    error = (stock.model(**more).logits[0, -1].float() - exact).abs().max()
    order = (exact - exact[answer[2]]).abs().argsort()
    for other in (order[1], order[-1]):
        changed = torch.cat([answer[:2], other[None], answer[3:]])
        close = bool((exact[other] - exact[answer[2]]).abs() <= 2 * error)
        assert contract_study._near_tie(stock.model, reference.model, inputs, options, answer, changed) is close
    assert not close, "the farthest id is no near-tie"
    assert contract_study._near_tie(stock.model, reference.model, inputs, options, answer, answer)
    assert not contract_study._near_tie(stock.model, reference.model, inputs, options, answer, answer[:3])


def plain_case(number):
    return replace(draw(Random(number), False), kind=PLAIN)


def prepared(stock, case):
    return prepare(stock.processor, replace(case, chats=case.chats[:1]), stock.device)[0]


def test_the_command_refuses_a_cpu_without_a_folder_and_an_unknown_preset(capsys, tmp_path):
    if not torch.cuda.is_available():
        assert contract_study.main([]) == 2
        assert "name an output folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("in the way")
    assert contract_study.main(["--output", str(tmp_path / "file"), "--preset", "exact"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert contract_study.main(["--preset", "fats", "--output", str(tmp_path)]) == 2
    assert "did you mean 'fast'" in capsys.readouterr().err


def test_the_command_writes_the_record(capsys, tmp_path):
    assert contract_study.main(["--cases", "8", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/contract.json")
    if not torch.cuda.is_available():
        assert [entry["what"] for entry in contract_study.read(path)["skipped"]][:1] == ["decode_graph"]
    assert capsys.readouterr().out.strip().endswith(str(path)) and contract_study.read(path)["cases"] == 8
