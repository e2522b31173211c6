"""Training of the tiny model: about 16 minutes on one H200, in as many calls as it takes.

What makes it fast: scenes are planned by worker processes and painted on the GPU; the forward pass is batched
(`tiny_forward.py`); a whole step is one CUDA graph per image size (`tiny_step.py`).

What makes it work: single signs first, then more and more scenes of up to six; 38 % "read all" questions, whose answers
hold the most letters; AdamW at 1e-3 with 500 warm-up steps and a linear decay over the last 40 %. The schedule is a
function of the seconds spent over the seconds planned, so that it ends well on a machine of any speed; what is exported
is an average of the weights over the last thousand steps or so.
"""

import io
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vlmopt.errors import VlmoptError
from vlmopt.files import write_atomic
from vlmopt.workbook import signs, tiny
from vlmopt.workbook.tiny_forward import tail_tokens
from vlmopt.workbook.tiny_step import Batch, Trainer

PEAK_RATE, WARM_UP_STEPS, DECAY_FROM, LAST_RATE = 1e-3, 500, 0.6, 0.01
MIX = {"read_all": 0.38, "colour": 0.18, "top": 0.12, "bottom": 0.12, "which_colour": 0.12, "count": 0.08}
SINGLE_UNTIL, MIXED_FROM, SINGLES_LEFT = 0.10, 0.30, 0.12
LOG_EVERY, EVALUATE_EVERY, SAVE_EVERY = 5, 15, 60  # seconds
LAST_ACTS = 8  # seconds kept for the last evaluation and the files
STEPS_AHEAD = 8  # steps that the host may queue before it waits for the GPU
HELD_OUT_STRIPS = 3000


@dataclass(frozen=True)
class Settings:
    """What the command line sets; see `tiny.parser`."""

    checkpoint: Path
    seconds: float
    total_seconds: float
    batch: int = 256
    strips: int = 150_000
    seed: int = 0
    no_graph: bool = False
    export_parts: Path | None = None


def rate_at(progress: float, step: int) -> float:
    """The learning rate: warm-up by steps, then flat, then a line down to a hundredth."""
    decay = min(1.0, max(0.0, progress - DECAY_FROM) / (1 - DECAY_FROM))
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - (1 - LAST_RATE) * decay)


def singles_at(progress: float) -> float:
    """The share of scenes with a single sign: all at first, few later."""
    ramp = min(1.0, max(0.0, progress - SINGLE_UNTIL) / (MIXED_FROM - SINGLE_UNTIL))
    return 1 - (1 - SINGLES_LEFT) * ramp


def make_batch(
    rng: random.Random, strips: signs.Strips, size: tuple[int, int], kinds: list[str], singles: float
) -> Batch:
    """A batch of one question for each of `kinds`."""
    scenes, tails, labels = [], [], []
    for kind in kinds:
        count = 1 if rng.random() < singles else rng.randint(2, signs.most_signs(size))
        scenes.append(signs.plan(rng, strips, size, count, kind))
        tail, label = tail_tokens(scenes[-1].question, scenes[-1].answer)
        tails.append(tail)
        labels.append(label)
    return Batch(size, signs.sign_table(scenes), torch.tensor(tails), torch.tensor(labels))


class Stream(IterableDataset):
    """Endless training batches; `singles` is shared with the training loop, which moves it."""

    def __init__(self, strips: signs.Strips, batch: int, seed: str, singles):
        self.strips, self.batch, self.seed, self.singles = strips, batch, seed, singles

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed} {worker.id if worker else 0}")
        while True:
            kinds = rng.choices(list(MIX), list(MIX.values()), k=self.batch)
            yield make_batch(rng, self.strips, rng.choice(signs.SIZES), kinds, self.singles.value)


@dataclass
class Progress:
    """Where training stands, over all calls: seconds, steps, and the rows of the log."""

    seconds: float = 0.0
    steps: int = 0
    losses: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(vars(self), indent=1) + "\n"


def save(folder: Path, trainer: Trainer, progress: Progress) -> None:
    """Write the checkpoint so that a kill leaves the previous one whole."""
    state = {name: value.cpu() for name, value in trainer.state().items()}
    weights = {name: view.clone() for name, view in trainer.views(state["average"]).items()}
    stream = io.BytesIO()
    torch.save({"trainer": state, "weights": weights, "progress": vars(progress)}, stream)
    write_atomic(folder / "checkpoint.pt", stream.getvalue())


def read(folder: Path) -> dict:
    """The checkpoint in a folder.

    Raises:
        VlmoptError: there is none, or it cannot be read.
    """
    try:
        return torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # OSError, EOFError, and what the reader of a damaged file makes of its first bytes
        raise VlmoptError(f"{folder} holds no whole checkpoint.pt; train first") from error


def result(folder: Path) -> tuple[dict[str, Tensor], str]:
    """The averaged weights of a checkpoint, by name, and the log as JSON."""
    saved = read(folder)
    return saved["weights"], Progress(**saved["progress"]).to_json()


def held_out_batches(seed: int, count: int) -> tuple[Tensor, list[Batch]]:
    """Strips that training never sees, and a batch of all kinds for every other image size."""
    strips = signs.draw_strips(seed + 1, HELD_OUT_STRIPS, is_held_out=True)
    rng = random.Random(seed)
    kinds = [signs.KINDS[i % len(signs.KINDS)] for i in range(max(count, len(signs.KINDS)))]
    return strips.pixels, [make_batch(rng, strips, size, kinds, SINGLES_LEFT) for size in signs.SIZES[::2]]


def draw(settings: Settings) -> signs.Strips:
    """The training strips, drawn by all cores."""
    with multiprocessing.get_context("fork").Pool() as pool:
        return signs.draw_strips(settings.seed, settings.strips, is_held_out=False, map_jobs=pool.imap)


class Call:
    """One call of the training: its clock, and the lines and files that it leaves."""

    def __init__(self, settings: Settings):
        self.settings, self.started = settings, time.monotonic()
        saved = read(settings.checkpoint) if (settings.checkpoint / "checkpoint.pt").exists() else None
        self.progress = Progress(**saved["progress"]) if saved else Progress()
        self.before, first = self.progress.seconds, self.progress.steps
        strips = draw(settings)
        self.say(f"{len(strips.texts)} strips drawn")
        self.singles = multiprocessing.Value("d", singles_at(self.share()))
        stream = Stream(strips, settings.batch, f"{settings.seed} {first}", self.singles)
        workers = max(1, min(12, (os.cpu_count() or 1) - 2))
        # The workers fork here, before this process touches the GPU.
        loader = DataLoader(
            stream, None, num_workers=workers, collate_fn=Batch._make, prefetch_factor=4, multiprocessing_context="fork"
        )
        self.batches = iter(loader)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())
        self.trainer = Trainer(settings.batch, strips.pixels, self.device, settings.seed, not settings.no_graph)
        if saved:
            self.trainer.load(saved["trainer"])
        torch.manual_seed(settings.seed + first)  # other noise than in the calls before
        pixels, self.held_out = held_out_batches(settings.seed, settings.batch)
        self.held_out_pixels = pixels.to(self.device)
        self.say(f"{self.trainer.master.numel() / 1e6:.2f} M parameters on {self.device}, from step {first}")

    def say(self, line: str) -> None:
        print(f"{self.before + self.spent():6.0f} s  {line}", flush=True)

    def spent(self) -> float:
        """Seconds of this call."""
        return time.monotonic() - self.started

    def share(self) -> float:
        """How much of the schedule is over, 0..1."""
        self.progress.seconds = self.before + self.spent()
        return min(1.0, self.progress.seconds / self.settings.total_seconds)

    def time_left(self) -> bool:
        """Whether neither this call's time nor the schedule is over."""
        return self.spent() < self.settings.seconds - LAST_ACTS and self.share() < 1

    def train(self) -> None:
        """Step while there is time; say, evaluate and save now and then."""
        due = {self.log: LOG_EVERY, self.evaluate: EVALUATE_EVERY, self.save: SAVE_EVERY}
        last = dict.fromkeys(due, self.spent())
        self.logged = (self.spent(), self.progress.steps)
        while self.time_left():
            share = self.share()
            self.singles.value = singles_at(share)
            self.trainer.train_on(next(self.batches), rate_at(share, self.progress.steps))
            self.progress.steps += 1
            if self.device.type == "cuda" and self.progress.steps % STEPS_AHEAD == 0:
                torch.cuda.synchronize()
            for act, seconds in due.items():
                if self.spent() - last[act] > seconds:
                    act()
                    last[act] = self.spent()

    def log(self) -> None:
        """A line, and a row, about the last step."""
        loss, right, norm = self.trainer.report.tolist()
        spent, steps = self.spent(), self.progress.steps
        speed = (steps - self.logged[1]) / (spent - self.logged[0])
        self.logged = (spent, steps)
        row = {
            "step": steps,
            "seconds": round(self.before + spent, 1),
            "loss": round(loss, 4),
            "exact": round(right, 4),
        }
        self.progress.losses.append({**row, "steps_per_s": round(speed, 2), "gradient_norm": round(norm, 3)})
        self.say(f"step {steps}  loss {loss:.3f}  exact {right:.3f}  {speed:.1f} it/s  norm {norm:.2f}")

    def evaluate(self) -> None:
        """A line, and a row, about held-out strings: exact answers, each token after the right ones."""
        right = torch.stack([self.trainer.exact(batch, self.held_out_pixels) for batch in self.held_out])
        each = right.float().mean(0).tolist()
        exact = {kind: round(fmean(each[i :: len(signs.KINDS)]), 3) for i, kind in enumerate(signs.KINDS)}
        row = {"step": self.progress.steps, "seconds": round(self.before + self.spent(), 1), "exact": exact}
        self.progress.evaluations.append(row)
        self.say("held out  " + "  ".join(f"{kind} {share:.3f}" for kind, share in exact.items()))

    def save(self) -> None:
        """The checkpoint, the log within."""
        self.share()
        save(self.settings.checkpoint, self.trainer, self.progress)

    def finish(self) -> None:
        """The last evaluation, the checkpoint, and the small files for a host that wants them."""
        self.evaluate()
        self.save()
        if folder := self.settings.export_parts:
            weights, log = result(self.settings.checkpoint)
            tiny.write_parts(tiny.with_weights(weights), folder)
            write_atomic(folder / tiny.LOG, log)
        self.say(f"step {self.progress.steps}: saved in {self.settings.checkpoint}")


def train(settings: Settings) -> Progress:
    """Train for `settings.seconds` of wall clock, set-up included, from the checkpoint if there is one.

    Raises:
        VlmoptError: the checkpoint is broken, or the folder cannot be written.
    """
    call = Call(settings)
    call.train()
    call.finish()
    return call.progress
