"""The embedded model: its folder, its tokenizer, its data set, and the pass that trained it."""

import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlmopt.bench import models
from vlmopt.bench.vqa import accuracy, normalize
from vlmopt.errors import VlmoptError
from vlmopt.workbook import signs, tiny, tiny_data, tiny_step, tiny_train
from vlmopt.workbook.tiny_forward import IGNORED, PREFIX, TAIL, Forward, make_tables, patches, tail_tokens

DATA = Path(__file__).parents[3] / "data"
CPU = torch.device("cpu")
BYTES = tiny.tokenizer()
SMALL = (128, 256)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The model is so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def strips() -> signs.Strips:
    return signs.draw_strips(5, 400, is_held_out=False)


def noisy_model():
    """Untrained, but with every parameter off its special start (ones, zeros), so that each one shows in the logits."""
    model = tiny.untrained(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def prompt(processor, image: torch.Tensor, question: str) -> dict:
    picture = Image.fromarray(image.permute(1, 2, 0).to(torch.uint8).numpy())
    return models.prompt(processor, picture, question)


def painted(batch: tiny_step.Batch, strips: signs.Strips) -> torch.Tensor:
    knots = torch.full((len(batch.signs), 3, *signs.KNOTS), 100.0)
    return signs.paint(batch.signs, strips.pixels, knots, batch.size)


def test_the_model_is_small_and_the_folder_is_what_the_recipe_writes(tmp_path):
    model = tiny.untrained()
    assert sum(parameter.numel() for parameter in model.parameters()) <= 9_500_000
    tiny.write_folder(model, tmp_path)
    ours = {path.name: path.read_bytes() for path in tiny.FOLDER.iterdir() if path.name != tiny.LOG}
    fresh = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    weights, expected = fresh.pop(tiny.WEIGHTS), ours.pop(tiny.WEIGHTS)
    assert ours == fresh
    assert len(weights) == len(expected) <= 19_000_000


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_the_tokenizer(text):
    tokens = BYTES(text).input_ids
    assert BYTES.decode(tokens) == text
    if "<" not in text:
        assert tokens == list(text.encode())


def test_special_tokens_have_qwens_names_and_one_id_each(reference):
    tokenizer = reference.processor.tokenizer
    for name, number in tiny.TOKEN_ID.items():
        assert tokenizer(name).input_ids == [number]
    hidden = tokenizer.decode(tokenizer("a<|im_end|>b<tool_call>c").input_ids, skip_special_tokens=True)
    assert hidden == "ab<tool_call>c"
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(tokenizer) <= reference.model.config.text_config.vocab_size <= 600
    assert reference.model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]


def test_the_chat_template_writes_qwens_form(reference):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "this"}]},
        {"role": "user", "content": "and?"},
    ]
    text = reference.processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "what?<|im_end|>\n<|im_start|>assistant\nthis<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert reference.processor.apply_chat_template(messages).endswith("and?<|im_end|>\n")


@pytest.mark.parametrize("size", [*signs.SIZES, (33, 47), (1, 1), (500, 120)])
def test_training_sizes_pass_the_processor_unchanged_and_odd_sizes_work(reference, size):
    inputs = prompt(reference.processor, torch.zeros(3, *size), "?")
    rows, columns = inputs["image_grid_thw"][0, 1:].tolist()
    assert inputs["pixel_values"].shape == (rows * columns, 1536)
    if size in signs.SIZES:
        assert (16 * rows, 16 * columns) == size


@pytest.mark.parametrize("size", [(160, 320), (256, 192)])
def test_training_sees_what_the_stock_model_sees(reference, strips, size):
    """Same tokens, same patches, same logits as processor and stock model, for all kinds of question in one batch."""
    model = noisy_model()
    batch = tiny_train.make_batch(random.Random(0), strips, size, list(signs.KINDS), singles=0.3)
    images, tables = painted(batch, strips), make_tables(model, size)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        logits = Forward(model.config)(weights, tables, images, batch.tail)
        for row, image, tail, labels in zip(logits, images, batch.tail, batch.labels, strict=True):
            answer = [token for token in labels.tolist() if token != IGNORED]
            question = bytes(tail.tolist()[1 : tail.tolist().index(tiny.TOKEN_ID["<|im_end|>"])]).decode()
            inputs = prompt(reference.processor, image, question)
            visual = [tiny.TOKEN_ID["<|image_pad|>"]] * tables.visual_tokens
            tokens = [*PREFIX, *visual, *tail.tolist()]
            asked = inputs["input_ids"].shape[1]
            assert tokens[:asked] == inputs["input_ids"][0].tolist()
            assert tokens[asked : asked + len(answer)] == answer and answer[-1] == tiny.TOKEN_ID["<|im_end|>"]
            whole = torch.tensor([tokens])
            inputs |= {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
            inputs["mm_token_type_ids"] = (whole == visual[0]).int()
            expected = model(**inputs).logits[0, -TAIL:]
            assert (row - expected).abs().max() < 2e-5 * expected.abs().max()


def test_every_parameter_moves_the_logits(strips):
    """So the comparison above can fail: a wrong use of any parameter shows far beyond its tolerance."""
    model = noisy_model()
    batch = tiny_train.make_batch(random.Random(0), strips, SMALL, ["top"], singles=1.0)
    weights = dict(model.named_parameters())
    logits = Forward(model.config)(weights, make_tables(model, SMALL), painted(batch, strips), batch.tail)
    size = logits.square().sum()
    gradients = torch.autograd.grad(size, list(weights.values()))
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        assert gradient.norm() * weight.norm() > 0.001 * size, name


def test_patches_are_the_processors(reference):
    image = torch.randint(0, 256, (3, *SMALL)).float()
    expected = prompt(reference.processor, image, "?")["pixel_values"].view(-1, 3, 2, 256)
    ours = patches(image[None])[0].view(-1, 3, 256)
    for frame in range(2):
        assert torch.allclose(ours, expected[:, :, frame], atol=1e-6)


def test_only_the_answer_and_its_end_are_learnt():
    tokens, labels = tail_tokens("how many?", "12")
    learnt = [(tokens[i + 1], label) for i, label in enumerate(labels) if label != IGNORED]
    assert learnt == [(ord("1"), ord("1")), (ord("2"), ord("2")), (tiny.TOKEN_ID["<|im_end|>"],) * 2]
    assert len(tokens) == len(labels) == TAIL
    with pytest.raises(ValueError, match="longer than"):
        tail_tokens("?" * TAIL, "12")


def trainer(strips: signs.Strips, seed: int = 0) -> tiny_step.Trainer:
    return tiny_step.Trainer(2, strips.pixels, CPU, seed)


def small_batch(strips: signs.Strips) -> tiny_step.Batch:
    return tiny_train.make_batch(random.Random(0), strips, SMALL, ["top", "count"], singles=1.0)


def test_training_lowers_the_loss(strips):
    learner, batch, losses = trainer(strips), small_batch(strips), []
    for _ in range(8):
        learner.train_on(batch, 1e-3)
        losses.append(learner.report[0].item())
    assert losses[0] > 5 and min(losses) < 0.5 * losses[0]


@pytest.mark.gpu
def test_captured_steps_learn_as_launched_ones_do(strips):
    batch, device = small_batch(strips), torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        captured = tiny_step.Trainer(2, strips.pixels, device)
        launched = tiny_step.Trainer(2, strips.pixels, device, graphs=False)
        for learner in (captured, launched):
            for _ in range(8):
                learner.train_on(batch, 1e-3)
        torch.cuda.synchronize()
    assert list(captured.captured) == [SMALL] and not launched.captured
    assert captured.step == launched.step == 8
    assert captured.report[0] < 4 and launched.report[0] < 4


def test_the_update_is_adamw_with_a_clipped_gradient(strips):
    learner = trainer(strips)
    weights = learner.master.clone().requires_grad_()
    stock = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    learner.rate.fill_(1e-3)
    for scale in (1e-5, 10.0):
        gradient = scale * torch.randn_like(weights)
        weights.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([weights], 1.0)
        stock.step()
        learner.update(gradient)
        assert torch.allclose(learner.master, weights, rtol=0, atol=5e-7)
    before = learner.master.clone()
    learner.update(torch.full_like(before, torch.nan))
    assert learner.master.isfinite().all() and not torch.equal(learner.master, before)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(strips, tmp_path):
    batch, straight = small_batch(strips), trainer(strips)
    straight.train_on(batch, 1e-3)
    tiny_train.save(tmp_path, straight, tiny_train.Progress(12.0, 1))
    saved = tiny_train.read(tmp_path)
    resumed = trainer(strips, seed=9)
    resumed.load(saved["trainer"])
    for learner in (straight, resumed):
        torch.manual_seed(4)
        learner.train_on(batch, 1e-3)
    assert torch.equal(straight.master, resumed.master) and torch.equal(straight.average, resumed.average)
    assert tiny_train.Progress(**saved["progress"]) == tiny_train.Progress(12.0, 1)


def test_a_second_call_resumes_and_the_result_becomes_a_model_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_train, "HELD_OUT_STRIPS", 100)
    monkeypatch.setattr(signs, "SIZES", (SMALL,))
    run, parts = str(tmp_path / "run"), str(tmp_path / "parts")
    for call in (1, 2):
        monkeypatch.setattr(tiny_train.Call, "time_left", lambda self, steps=2 * call: self.progress.steps < steps)
        command = ["train", "--checkpoint", run, "--export-parts", parts, "--batch", "2", "--strips", "200"]
        assert tiny.main(command) == 0
        progress = tiny_train.Progress(**tiny_train.read(tmp_path / "run")["progress"])
        assert progress.steps == 2 * call and len(progress.evaluations) >= call and progress.seconds > 0
    assert tiny.main(["export", "--checkpoint", run, "--output", str(tmp_path / "a")]) == 0
    assert tiny.main(["join-parts", "--parts", parts, "--output", str(tmp_path / "b")]) == 0
    exported, joined = ({path.name: path.read_bytes() for path in (tmp_path / f).iterdir()} for f in "ab")
    assert exported == joined and tiny.LOG in exported


def test_the_schedule_warms_up_stays_and_decays_and_single_signs_give_way():
    assert tiny_train.rate_at(0, 0) == pytest.approx(1e-3 / 500)
    assert tiny_train.rate_at(0.6, 500) == pytest.approx(1e-3)
    assert tiny_train.rate_at(0.8, 500) == pytest.approx(0.505e-3)
    assert tiny_train.rate_at(1.0, 500) == pytest.approx(1e-5)
    assert [tiny_train.singles_at(share) for share in (0, 0.1, 0.3, 1)] == pytest.approx([1, 1, 0.12, 0.12])


def test_the_data_set_is_rebuilt_bit_for_bit(tmp_path):
    tiny_data.write(tmp_path / "data", progress=False)
    rebuilt = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    assert rebuilt == {path.name: path.read_bytes() for path in DATA.iterdir()}
    assert sum(map(len, rebuilt.values())) <= 6_000_000


def test_the_samples_are_of_all_kinds_and_their_strings_were_never_seen(samples):
    assert Counter(samples["kind"]) == tiny_data.COUNTS and len(samples) == 500
    assert samples["question_id"] == list(range(500))
    for sample in samples.remove_columns("image"):
        right = tiny.right_answer(sample["answers"])
        if sample["kind"] == "read_all":
            assert 20 <= len(right) <= 60 and 3 <= len(right.split(", ")) <= 6
        if sample["kind"] in ("read_all", "top", "bottom", "colour"):
            assert all(map(signs.held_out, right.split(", ")))


def test_people_vary_and_disagree_but_agree_on_the_right_answer(samples):
    disagreeing = Counter()
    for sample in samples.remove_columns("image"):
        answers, right = sample["answers"], tiny.right_answer(sample["answers"])
        assert len(answers) == 10 and answers.count(right) >= 4
        assert accuracy(right, answers) == 1.0
        disagreeing[sum(normalize(answer) != normalize(right) for answer in answers)] += 1
    assert set(disagreeing) <= {0, 1, 2, 3} and disagreeing[0] < 25 and disagreeing[1] + disagreeing[3] > 200


def test_the_images_are_jpeg_bytes_of_eight_or_more_sizes(samples):
    import datasets

    raw = samples.cast_column("image", datasets.Image(decode=False))
    assert all(row["bytes"][:2] == b"\xff\xd8" for row in raw["image"])
    assert {image.size[::-1] for image in samples["image"]} == set(signs.SIZES)


def test_evaluate_counts_equal_strings_by_kind(monkeypatch):
    said = iter(["abc", "ABC", "2"])
    monkeypatch.setattr(tiny, "ask", lambda *_: next(said))
    rows = [{"image": None, "question": "?", "answers": ["abc"] * 5 + ["x"], "kind": "top"}] * 2
    rows.append({"image": None, "question": "?", "answers": ["2"] * 4 + ["3"] * 3, "kind": "count"})
    assert tiny.evaluate(None, None, rows, progress=False) == {"top": 0.5, "count": 1.0, "all": pytest.approx(2 / 3)}


def test_ask_gives_what_generate_writes_without_prompt_and_special_tokens(reference, samples):
    sample = samples[0]
    pixels = torch.from_numpy(np.array(sample["image"])).permute(2, 0, 1)
    inputs = prompt(reference.processor, pixels, sample["question"])
    tokens = reference.model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    written = [token for token in tokens.tolist() if token < 256]
    answer = tiny.ask(reference.model, reference.processor, sample["image"], sample["question"], 6)
    assert answer == bytes(written).decode(errors="replace")


@pytest.mark.parametrize(
    "command",
    [
        ["join-parts", "--parts", "nowhere", "--output", "out"],
        ["export", "--checkpoint", "nowhere", "--output", "out"],
        ["evaluate", "--model-path", "nowhere", "--dataset-path", str(DATA)],
        ["evaluate", "--dataset-path", "nowhere"],
    ],
)
def test_a_missing_folder_gets_one_sentence(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    assert tiny.main(command) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "nowhere" in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_lost_part_or_another_models_weights_are_refused(tmp_path):
    parts = tiny.write_parts(tiny.untrained(), tmp_path / "parts")
    assert len(parts) == 2 and all(part.stat().st_size <= 15 * 2**20 for part in parts)
    shutil.move(parts[1], tmp_path / "elsewhere")
    with pytest.raises(VlmoptError, match="fetch them again"):
        tiny.join_parts(tmp_path / "parts")
    with pytest.raises(VlmoptError, match="another configuration"):
        tiny.with_weights({"lm_head.weight": torch.zeros(3)})
