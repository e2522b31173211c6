"""The study of quantised copies: its measures, and its record's path from a few samples to answer and gate."""

import json

import pytest
import torch

from vlmopt.bench import models
from vlmopt.bench.dataset import open_samples
from vlmopt.errors import VlmoptError
from vlmopt.kernels import gemv_q4, gemv_q8, gemv_ring_copies
from vlmopt.kernels.gemv_ring import Ring
from vlmopt.ops import Ops
from vlmopt.quant import costs
from vlmopt.quant.calibration import GPTQ
from vlmopt.quant.copies import quantize
from vlmopt.quant.schemes import SCHEMES
from vlmopt.stages.tables import grid_table
from vlmopt.stages.vision import encode
from vlmopt.weights import collect
from vlmopt.workbook import figures, quant_bench, quant_study, quant_variants, signs, tiny_data
from vlmopt.workbook.kernel_study import Bench
from vlmopt.workbook.record import ROOT, Record, Roof

CPU = Bench(torch.device("cpu"), torch.float32, "smoke", Roof(1e10), (1.0,))


@pytest.fixture(scope="module")
def samples():
    data = open_samples(ROOT / "data")
    return [data[i] for i in range(3)]


@pytest.fixture(scope="module")
def found(samples):
    return quant_study.measure(samples, long_prompts=0, schemes=("int4", GPTQ.name), calibration=16)


def test_repeated_n_grams_tell_a_loop_from_text():
    assert quant_study.repeated(list(range(100))) == 0
    assert quant_study.repeated([1, 2, 3] * 40) > 0.9
    assert quant_study.repeated([1, 2, 3]) == 0


def test_the_record_holds_every_part_and_the_head_changes_nothing(found):
    rows = found["rows"]
    parts = "attention", "mlp", "all", "kv fp8", "prompt"
    schemes = "int4", GPTQ.name
    assert list(rows) == ["none", "head8", "kv fp8", *(f"{scheme} {part}" for scheme in schemes for part in parts)]
    assert found["samples"] == 3 and found["calibration_samples"] == 16
    same = ("accuracy", "ids_equal", "tokens_equal", "kl")
    assert [rows["head8"][name] for name in same] == [rows["none"][name] for name in same]
    assert rows["none"]["ids_equal"] == 1 and rows["none"]["kl"] == 0
    assert 0 < rows["kv fp8"]["kl"] < rows["int4 all"]["kl"] != rows["int4 kv fp8"]["kl"]
    assert rows["int4 attention"]["kl"] > 0 and rows["int4 mlp"]["kl"] > 0
    sizes = {name: row["bytes_per_token"] for name, row in rows.items()}
    assert sizes["int4 all"] < sizes["int4 mlp"] < sizes["int4 attention"] < sizes["none"] > sizes["head8"]
    assert sizes["int4 prompt"] == sizes["int4 kv fp8"] == sizes["int4 all"] and rows["int4 prompt"]["kl"] not in (
        0,
        rows["int4 all"]["kl"],
    )
    for part in parts:
        own, plain = rows[f"{GPTQ.name} {part}"], rows[f"int4 {part}"]
        assert own["bytes_per_token"] == plain["bytes_per_token"] and 0 < own["kl"] != plain["kl"]


def test_calibration_sees_prompts_with_answers_and_no_string_of_the_evaluation(reference, samples):
    batches = list(quant_variants.calibration_batches(reference, 12))
    drawn = tiny_data.calibration(12)
    decode = reference.processor.decode
    questions = {question for _, question, _ in drawn}
    assert len(batches) == 12 and len(questions) > 5 and len({image.size for image, *_ in drawn}) > 3
    for batch, (image, question, answer) in zip(batches, drawn, strict=True):
        prompt = models.prompt(reference.processor, image, question)
        count = prompt["input_ids"].shape[1]
        assert torch.equal(batch["pixel_values"], prompt["pixel_values"])
        assert torch.equal(batch["input_ids"][:, :count], prompt["input_ids"])
        assert decode(batch["input_ids"][0, count:]) == f"{answer}<|im_end|>"
        assert batch["attention_mask"].all() and not batch["mm_token_type_ids"][:, count:].any()
        assert torch.equal(batch["mm_token_type_ids"][:, :count], prompt["mm_token_type_ids"])
        if not answer.isdigit() and answer not in signs.NAMES:
            assert not any(map(signs.held_out, answer.split(", ")))
    assert not any(image.tobytes() == sample["image"].tobytes() for image, *_ in drawn for sample in samples)


def test_the_towers_weights_and_then_their_inputs_are_rounded(reference, samples):
    """Products of the blocks' qkv and MLP alone, of which the tower makes three a block."""
    vision = collect(reference.model, packed=False).vision
    inputs = models.prompt(reference.processor, samples[0]["image"], samples[0]["question"])
    pixels, table = inputs["pixel_values"], grid_table(tuple(map(tuple, inputs["image_grid_thw"].tolist())), vision)
    plain, _ = encode(pixels, table, vision, Ops())
    for scheme in ("int8", "fp8"):
        found = quant_variants.towers(vision, SCHEMES[scheme])
        off = [(encode(pixels, table, *found[part])[0] - plain).norm() / plain.norm() for part in found]
        assert list(found) == ["vision", "vision inputs"] and 1e-4 < off[0] < 0.1 and off[0] < off[1] < 0.2
        for block, own in zip(vision.blocks, found["vision"][0].blocks, strict=True):
            assert own.proj is block.proj and own.fc1.bias is block.fc1.bias
            copy = quantize(block.fc2.weight, SCHEMES[scheme])
            assert torch.equal(own.fc2.weight, copy.dequantize(torch.float32))
        ops, block = found["vision inputs"][1], found["vision"][0].blocks[0]
        x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
        near = quantize(x, SCHEMES[scheme]).dequantize(torch.float32)
        assert torch.equal(ops.linear(x, block.qkv.weight, None), Ops().linear(near, block.qkv.weight, None))
        fc1 = block.fc1.weight, block.fc1.bias, "tanh"
        assert torch.equal(ops.bias_gelu(x, *fc1), Ops().bias_gelu(near, *fc1))
        assert torch.equal(ops.linear(x, block.proj.weight, None), Ops().linear(x, block.proj.weight, None))


def test_a_prompt_is_read_anew_where_text_or_tower_are_others(reference, samples):
    subject = quant_study.Subject(models.load(models.TINY, dtype=torch.float32))
    chosen = quant_variants.variants(subject.engine.weights, ("int8",), {})
    rows = {name: start[0].clone() for name, _, start, _ in subject.starts(chosen, samples[0], 4)}
    same = [name for name, row in rows.items() if torch.equal(row, rows["none"])]
    # a prompt attends to keys and values before they are rounded, so that its last row is the same over eight bits
    assert same == ["none", "head8", "kv fp8", "int8 attention", "int8 mlp", "int8 all", "int8 kv fp8"]
    assert len({row.sum().item() for row in rows.values()}) == 1 + len(rows) - len(same)


def test_a_variant_is_followed_over_its_own_cache(reference, samples):
    subject = quant_study.Subject(models.load(models.TINY, dtype=torch.float32))
    chosen = quant_variants.variants(subject.engine.weights, ("int8",), {})
    caches = {name: start[3].dtype for name, _, start, _ in subject.starts(chosen, samples[0], 4)}
    eight = [name for name, dtype in caches.items() if dtype == torch.float8_e4m3fn]
    assert eight == [name for name, variant in chosen.items() if variant.kv] == ["kv fp8", "int8 kv fp8"]


def test_a_divergence_is_taken_only_after_the_same_ids():
    one, other = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    plain = [1, 0, 1], [one, one, one]
    assert len(quant_study._divergences(plain, [1, 1, 1], [one, other, one])) == 2
    expected = torch.nn.functional.kl_div(other.log_softmax(0), one.log_softmax(0), log_target=True, reduction="sum")
    first = quant_study._divergences(([1], [one]), [1], [other])
    assert first == pytest.approx([expected.item()])


def test_bytes_are_counted_as_the_kernels_read_them(reference):
    text = collect(reference.model, packed=False).text
    sizes = quant_bench.savings(text)
    assert sizes["int4"].copied < 0.35 * sizes["int4"].plain < sizes["int8"].copied < 0.55 * sizes["int8"].plain
    assert len(quant_bench.saving_rows(text)) == len(SCHEMES)


def test_the_notebooks_path_from_predictions_to_the_answer(samples):
    record = Record("40_quantization", "?", "smoke", "tiny", {"device": "cpu", "torch": "2"})
    for prediction in quant_bench.predictions(CPU):
        record.predict(*prediction)
    record.check("a check", "near", 0, 1)
    quant_bench.measure_accuracy(record, samples[:1])
    quant_bench.measure_answers(record, samples, CPU)
    quant_bench.measure_sweep(record, CPU, 0)
    for target in quant_bench.TARGETS:
        for case in CPU.cases(target):
            record.measure(target.label(case), "torch", "us", "us", [1.0])
    quant_bench.settle(record, CPU)
    assert all(prediction["measured"] is not None for prediction in record.predictions)
    answer, verdict = quant_bench.conclude(record)
    assert "int8" in answer and "int4" in answer and "GPU" in verdict
    assert "40_quantization" in figures.of(record)
    record.measure("random-2b", "fast", quant_bench.STEP, "ms", [1.0])
    classes = {"fast": "near", "fast8": "lossy", "fast4": "lossy"}
    record.config["providers"] = {name: {"class": cls} for name, cls in classes.items()}
    for preset, ms in (("fast8", 0.7), ("fast4", 1.2)):
        record.measure("random-2b", preset, quant_bench.STEP, "ms", [ms])
    answer, verdict = quant_bench.conclude(record)
    assert "`fast` (near) 1 ms, `fast8` (lossy) 0.7 ms" in answer
    assert verdict == "`fast4` (lossy) is not faster than `fast` and is dropped."


def test_row_errors_grow_with_fewer_bits(reference):
    record = Record("40_quantization", "?", "smoke", "tiny", {"device": "cpu", "torch": "2"})
    record.check("a check", "near", 0, 1)
    quant_bench.measure_row_errors(record, "tiny", collect(reference.model, packed=False).text)
    for part in ("qkv", "o", "gate_up", "down", "head"):
        int8, fp8, int4 = (record.value("row_error", scheme, f"tiny {part}") for scheme in SCHEMES)
        assert int8 < 0.02 < fp8 < 0.04 < int4 < 0.2, part


def test_drafts_of_four_bits_change_one_thing_each():
    base = gemv_q4.OTHER
    for draft in quant_bench.candidates_q4(base):
        changed = [name for name in vars(base) if getattr(draft, name) != getattr(base, name)]
        assert len(changed) == 1, draft


def test_drafts_of_a_ring_change_one_thing_each():
    for base in (Ring(4), Ring(3, 4), Ring(6, blocks=3)):
        drafts = quant_bench.candidates_ring(base)
        for draft in drafts:
            assert sum(getattr(draft, name) != getattr(base, name) for name in vars(base)) == 1, draft
        assert len({quant_bench.describe(ring) for ring in (base, *drafts)}) == 1 + len(drafts)


def test_the_ring_and_triton_are_drafts_where_the_ring_serves():
    for chosen in quant_bench.PRODUCTS:
        case = next(case for case in chosen.module.CASES if case.name.startswith("down 1 "))
        drafts = list(quant_bench.drafts_of(chosen, case, ring=True))
        assert "stages" in drafts[0] and drafts[-1] == quant_bench.TRITON
        assert quant_bench.TRITON not in quant_bench.drafts_of(chosen, case, ring=False)


def test_what_the_ring_serves_is_what_its_lines_allow():
    eight, four = quant_bench.PRODUCTS
    widths = {case.params["width"] for case in eight.module.CASES if eight.own(case)}
    assert widths == {256, 2048, 6144}
    assert not any(case.params["fp8"] for case in eight.module.CASES if eight.own(case))
    assert {case.params["width"] for case in four.module.CASES if four.own(case)} >= {2048, 6144}


def test_a_refused_draft_is_skipped_with_its_reason():
    record = Record("40_quantization", "?", "smoke", "tiny", {"device": "cpu", "torch": "2"})

    def refused(*args):
        raise VlmoptError("a ring has 1 to 16 stages")

    assert list(quant_bench.usable(record, "down", {"one": int, "other": refused}, ["1"])) == ["one"]
    assert record.skipped == [{"what": "down: other", "reason": "a ring has 1 to 16 stages"}]


def test_the_rings_predictions_are_its_own(monkeypatch):
    bench = Bench(torch.device("cuda"), torch.bfloat16, "full", Roof(4.6e12), (2.0,))
    monkeypatch.setattr(quant_bench, "has_ring", lambda bench: True)
    found = {what: predicted for what, predicted, _ in quant_bench.predictions(bench)}
    assert found["gemv_q8 down 1 x 2048x6144 int8, vlmopt"] == 4.2
    assert found["gemv_q4 gate_up 1 x 12288x2048 gated, vlmopt"] == 4.3
    monkeypatch.setattr(quant_bench, "has_ring", lambda bench: False)
    others = {what: predicted for what, predicted, _ in quant_bench.predictions(bench)}
    changed = [what for what in found if found[what] != others[what]]
    assert found["lm_head_q8 head 1 x 151936x2048, vlmopt"] == 85
    assert len(changed) == 11 and not any("fp8" in what for what in changed)


def test_products_are_called_as_the_table_calls_them(monkeypatch):
    """Where the ring does not serve, and where it does."""
    for chosen, other in zip(quant_bench.PRODUCTS, (gemv_q8, gemv_q4), strict=True):
        case = next(case for case in chosen.module.CASES if case.cpu)
        args = chosen.module.make(case.params, "cpu", torch.float32, torch.Generator().manual_seed(0))
        monkeypatch.setattr(other, "launch", lambda *given: given)
        assert all(a is b for a, b in zip(chosen.launch(*args), args, strict=True))
    monkeypatch.setattr(gemv_ring_copies, "serves", lambda *copy: True)
    monkeypatch.setattr(gemv_ring_copies, "launch", lambda *given, **config: given)
    x, weight, scale, *rest = range(6)
    assert quant_bench.PRODUCTS[0].launch(x, weight, scale, *rest) == (x, weight, scale, None, *rest)


def test_the_panel_measures_a_scheme():
    for scheme in SCHEMES:
        assert quant_bench.one(2, scheme, CPU)["p50"] > 0


def test_the_tracked_record_covers_every_scheme_and_part():
    record = costs.recorded()
    parts, schemes = (*quant_variants.PARTS, quant_variants.PROMPT, quant_variants.KV), (*SCHEMES, GPTQ.name)
    expected = {"none", "head8", quant_variants.KV, *(f"{scheme} {part}" for scheme in schemes for part in parts)}
    expected |= {f"{scheme} {part}" for scheme in ("int8", "fp8") for part in ("vision", "vision inputs")}
    assert set(record["rows"]) == expected and record["samples"] == 500
    assert record["rows"]["head8"]["ids_equal"] == 1 and record["calibration_samples"] == quant_study.CALIBRATION
    assert all(record["rows"][f"{GPTQ.name} {part}"]["kl"] < record["rows"][f"int4 {part}"]["kl"] for part in parts)
    assert record["rows"]["none"]["accuracy"] - record["rows"]["int8 all"]["accuracy"] <= 0.005
    for scheme in schemes:
        for prompt in (False, True):
            assert costs.obstacle(scheme, prompt) == "" and "500 samples" in costs.told(scheme, prompt)
    for scheme in ("none", *schemes):
        assert costs.kv_obstacle(scheme) == "" and "500 samples" in costs.kv_told(scheme)
    kv = record["rows"][quant_variants.KV]
    assert kv["ids_equal"] >= 0.99 and record["rows"]["none"]["accuracy"] - kv["accuracy"] <= 0.005


def test_a_missing_record_is_one_sentence(tmp_path):
    with pytest.raises(VlmoptError, match="make it with python -m"):
        costs.recorded(tmp_path / "costs.json")
    (tmp_path / "bad.json").write_text(json.dumps([])[:1])
    with pytest.raises(VlmoptError, match="cannot be read"):
        costs.recorded(tmp_path / "bad.json")
