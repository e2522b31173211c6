"""The embedded data set: 500 questions about held-out signs in TextVQA's columns, the same bytes at every build.

Columns: `question_id` (int), `image` (JPEG bytes), `question`, `answers` (ten strings, as ten people might type them),
`kind` (which of the six kinds of question). The right answer is the most frequent of the ten, letter for letter
(`tiny.right_answer`): at least four people give it so, at least seven in a form that scoring normalises to it, and one
to three disagree. Everything random comes from `random.Random`, whose streams do not change between Python versions;
painting is exact (see `signs.py`); the JPEG bytes are those of the pinned Pillow.
"""

import io
import random
import shutil
from pathlib import Path

import datasets
import torch
from PIL import Image
from tqdm.auto import tqdm

from vlmopt.workbook import signs

COUNTS = {"read_all": 130, "colour": 90, "top": 70, "bottom": 70, "count": 70, "which_colour": 70}
STRIPS = 4000
JPEG_QUALITY = 85
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LOOKALIKE = str.maketrans("oibslzgumnehct05186", "0l6z1sqvnmcfek68o50")
FEATURES = datasets.Features(
    {
        "question_id": datasets.Value("int64"),
        "image": datasets.Image(),
        "question": datasets.Value("string"),
        "answers": datasets.List(datasets.Value("string")),
        "kind": datasets.Value("string"),
    }
)
README = """\
# The embedded data set

500 questions about rendered signs in the columns of TextVQA (`question_id`, `image`, `question`, `answers`) and `kind`.
No string on any sign was seen by the embedded model in training. It opens with
`datasets.load_from_disk("./data")` and is rebuilt, bit for bit on the pinned Pillow, by

    python -m vlmopt.workbook.tiny data --output data

The right answer is the most frequent of the ten, letter for letter.

Licence: our own work, Apache-2.0 like the rest of the repository. The lettering is drawn with the DejaVu fonts that
matplotlib ships (Bitstream Vera and DejaVu licence; drawings made with the fonts are free of it).
"""


def grain(rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Noise in whole numbers, nearly normal, of a random standard deviation up to 3: fp32 of `shape`."""
    level = rng.randint(0, 6)
    count = torch.Size(shape).numel()
    four = torch.frombuffer(bytearray(rng.randbytes(4 * count)), dtype=torch.uint8).view(4, count).int().sum(0)
    return ((four - 510) * level + 148).div(296, rounding_mode="floor").view(shape).float()


def background(rng: random.Random) -> torch.Tensor:
    """The colours between which a background runs, fp32 [1, 3, 4, 6]; `tiny_step.backgrounds` draws many."""
    rows, columns = signs.KNOTS
    light = torch.tensor([rng.randint(*signs.LIGHT) for _ in range(rows * columns)]).view(1, 1, rows, columns)
    tint = torch.tensor([rng.randint(-signs.TINT, signs.TINT) for _ in range(3)]).view(1, 3, 1, 1)
    hue = torch.tensor([rng.randint(-signs.HUE, signs.HUE) for _ in range(3 * rows * columns)])
    return (light + tint + hue.view(1, 3, rows, columns)).float()


def photograph(rng: random.Random, scene: signs.Scene, strips: signs.Strips) -> bytes:
    """The scene as JPEG bytes."""
    image = signs.paint(signs.sign_table([scene]), strips.pixels, background(rng), scene.size)
    image = (image + grain(rng, image.shape)).clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0)
    stream = io.BytesIO()
    Image.fromarray(image.numpy()).save(stream, "JPEG", quality=JPEG_QUALITY)
    return stream.getvalue()


def same_in_other_words(rng: random.Random, scene: signs.Scene) -> str:
    """The right answer as another person types it; scoring normalises it to the same."""
    right = scene.answer
    forms = [right.upper(), right.capitalize(), right + ".", right.upper() + "."]
    if scene.kind == "read_all":
        forms += [right.replace(", ", " "), right.title()]
    else:
        forms.append("the " + right)
    if right in map(str, range(11)):
        word = NUMBER_WORDS[int(right)]
        forms += [word, word.capitalize(), word + "."]
    return rng.choice([form for form in forms if form != right])


def disagreement(rng: random.Random, scene: signs.Scene) -> str:
    """A wrong answer of the sort that people give."""
    right = scene.answer
    if scene.kind == "count":
        options = [str(int(right) + 1), str(max(0, int(right) - 1)), "many"]
    elif scene.kind == "which_colour":
        options = [name for name in signs.NAMES if name != right]
    elif scene.kind == "read_all":
        options = [", ".join(scene.texts[:-1]), ", ".join(scene.texts[1:]), ", ".join(reversed(scene.texts))]
    else:
        options = [right[:-1], right + right[-1], right.translate(LOOKALIKE), *scene.texts]
    wrong = [option for option in options if option not in (right, "")]
    return rng.choice([*wrong, "unanswerable"])


def ten_answers(rng: random.Random, scene: signs.Scene) -> list[str]:
    """Ten people's answers: 1-3 disagree, 4 or more are the right one letter for letter, the others vary its form."""
    wrong, varied = rng.randint(1, 3), rng.randint(1, 3)
    answers = [disagreement(rng, scene) for _ in range(wrong)]
    answers += [same_in_other_words(rng, scene) for _ in range(varied)]
    answers += [scene.answer] * (10 - len(answers))
    rng.shuffle(answers)
    return answers


def plan_sample(rng: random.Random, strips: signs.Strips, size: tuple[int, int], kind: str) -> signs.Scene:
    """A scene for one sample: "read all" has 3-6 signs and an answer of 20-60 tokens (one a character)."""
    least = 3 if kind == "read_all" else 1
    while True:
        scene = signs.plan(rng, strips, size, rng.randint(least, signs.most_signs(size)), kind)
        if kind != "read_all" or 20 <= len(scene.answer) <= signs.LONGEST_ANSWER:
            return scene


def build(seed: int = 0, progress: bool = True) -> datasets.Dataset:
    """The 500 samples, in an order that mixes the kinds."""
    rng = random.Random(seed)
    strips = signs.draw_strips(seed, STRIPS, is_held_out=True)
    kinds = [kind for kind, count in COUNTS.items() for _ in range(count)]
    rng.shuffle(kinds)
    rows = []
    for number, kind in enumerate(tqdm(kinds, desc="samples", disable=not progress)):
        scene = plan_sample(rng, strips, signs.SIZES[number % len(signs.SIZES)], kind)
        image = {"bytes": photograph(rng, scene, strips), "path": None}
        answers = ten_answers(rng, scene)
        rows.append(
            {"question_id": number, "image": image, "question": scene.question, "answers": answers, "kind": kind}
        )
    built = datasets.Dataset.from_list(rows, features=FEATURES)
    built._fingerprint = f"signs-{seed}"  # else a random one, and the folder would differ at every build
    return built


def calibration(count: int, seed: int = 1) -> list[tuple[Image.Image, str, str]]:
    """Image, question and right answer of `count` samples whose strings training may see and the 500 never show."""
    rng = random.Random(seed)
    strips = signs.draw_strips(seed, 2 * signs.MAX_SIGNS * count, is_held_out=False)
    found = []
    for number in range(count):
        scene = plan_sample(rng, strips, rng.choice(signs.SIZES), signs.KINDS[number % len(signs.KINDS)])
        image = Image.open(io.BytesIO(photograph(rng, scene, strips)))
        found.append((image, scene.question, scene.answer))
    return found


def write(folder: str | Path, progress: bool = True) -> Path:
    """Write the data set and its README to `folder`, replacing what is there."""
    folder = Path(folder)
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    build(progress=progress).save_to_disk(fresh)
    (fresh / "README.md").write_text(README)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder
