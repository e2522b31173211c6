"""One training step of the tiny model: paint, forward, backward, clip, AdamW, average; on a GPU, one graph launch.

All parameters live in one fp32 vector, of which the forward pass reads a bf16 copy, so that an optimizer step is a
dozen operations on whole vectors; nothing in a step waits for the host, which lets CUDA capture it whole.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmopt.workbook import signs, tiny
from vlmopt.workbook.tiny_forward import IGNORED, TAIL, Forward, Tables, make_tables, move

BETA_1, BETA_2, WEIGHT_DECAY, CLIP = 0.9, 0.98, 0.01, 1.0
SHORTEST_AVERAGE = 1e-3  # the exported average moves by at least this share a step


class Batch(NamedTuple):
    """One image size's questions: `signs` int32 [B, 6, 11], `tail` and `labels` int64 [B, TAIL]."""

    size: tuple[int, int]
    signs: Tensor
    tail: Tensor
    labels: Tensor


def backgrounds(count: int, device: torch.device) -> Tensor:
    """The colours between which backgrounds run, fp32 [count, 3, 4, 6], as `tiny_data.background` draws one."""
    light = torch.randint(signs.LIGHT[0], signs.LIGHT[1] + 1, (count, 1, *signs.KNOTS), device=device)
    tint = torch.randint(-signs.TINT, signs.TINT + 1, (count, 3, 1, 1), device=device)
    hue = torch.randint(-signs.HUE, signs.HUE + 1, (count, 3, *signs.KNOTS), device=device)
    return (light + tint + hue).float()


def photograph(table: Tensor, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Painted scenes with a background, noise of random strength and the image codec: fp32 [B, 3, H, W], 0..255."""
    count, device = len(table), table.device
    image = signs.paint(table, pixels, backgrounds(count, device), size)
    noise = torch.randn_like(image) * (3.5 * torch.rand(count, 1, 1, 1, device=device))
    quality = 78 + 18 * torch.rand(count, device=device)
    return signs.jpeg_like((image + noise).round().clamp(0, 255), quality)


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the answers' tokens; an answer of n tokens counts sqrt(n), so that short ones matter too."""
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    learnt = labels != IGNORED
    weight = learnt * learnt.sum(1, keepdim=True).rsqrt()
    return (each.view_as(weight) * weight).sum() / weight.sum()


def all_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether every token of each answer is the most likely one given the ones before it: bool [B]."""
    return ((logits.argmax(-1) == labels) | (labels == IGNORED)).all(1)


class Trainer:
    """Parameters, optimizer and the captured steps. State is a handful of fp32 vectors as long as the model.

    On a GPU it is to be made and used on one stream other than the default one, which cannot be captured.
    """

    def __init__(self, batch: int, pixels: Tensor, device: torch.device, seed: int = 0, graphs: bool = True):
        self.model = tiny.untrained(seed)
        self.device, self.pixels = device, pixels.to(device)
        self.graphs = graphs and device.type == "cuda"
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.forward = Forward(self.model.config)
        parameters = dict(self.model.named_parameters())
        self.master = torch.cat([p.detach().flatten() for p in parameters.values()]).to(device)
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.average = self.master.clone()
        self.step = torch.zeros((), device=device)
        self.rate = torch.zeros((), device=device)
        self.working = self.master.to(self.dtype, copy=True)
        self.shapes = {name: p.shape for name, p in parameters.items()}
        self.weights = {name: view.detach().requires_grad_() for name, view in self.views(self.working).items()}
        self.signs = torch.zeros(batch, signs.MAX_SIGNS, len(signs.SIGN_COLUMNS), dtype=torch.int32, device=device)
        self.tail = torch.zeros(batch, TAIL, dtype=torch.int64, device=device)
        self.labels = torch.zeros_like(self.tail)
        self.report = torch.zeros(3, device=device)  # loss, share of answers all right, gradient norm
        self.tables: dict[tuple[int, int], Tables] = {}
        self.eager_steps: dict[tuple[int, int], int] = {}
        self.captured: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.graphs else None

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters by name, as views of a vector of all of them."""
        pieces = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def tables_of(self, size: tuple[int, int]) -> Tables:
        """The tables of an image size, made at the first call."""
        if size not in self.tables:
            self.tables[size] = move(make_tables(self.model, size), self.device, self.dtype)
        return self.tables[size]

    def train_on(self, batch: Batch, rate: float) -> None:
        """One step; on a GPU the third and later ones of an image size replay a graph."""
        self.rate.fill_(rate)
        for static, fresh in ((self.signs, batch.signs), (self.tail, batch.tail), (self.labels, batch.labels)):
            static.copy_(fresh.pin_memory() if self.device.type == "cuda" else fresh, non_blocking=True)
        if batch.size in self.captured:
            self.captured[batch.size].replay()
            return
        self.learn(batch.size)
        self.eager_steps[batch.size] = self.eager_steps.get(batch.size, 0) + 1
        if self.graphs and self.eager_steps[batch.size] == 2:
            self.capture(batch.size)

    def capture(self, size: tuple[int, int]) -> None:
        """Record the step of an image size; a refusal is printed, and training goes on without new graphs."""
        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                self.learn(size)
            self.captured[size] = graph
        except RuntimeError as error:
            self.graphs = False
            print(f"no graph for {size}, every kernel will be launched: {error}", flush=True)

    def learn(self, size: tuple[int, int]) -> None:
        """A whole step on the static inputs, without a word between host and device."""
        with torch.no_grad():
            self.working.copy_(self.master)
            images = photograph(self.signs, self.pixels, size)
        logits = self.forward(self.weights, self.tables_of(size), images, self.tail)
        loss = answer_loss(logits, self.labels)
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        norm = self.update(torch.cat([gradient.flatten() for gradient in gradients]).float())
        right = all_right(logits.detach(), self.labels).float().mean()
        self.report.copy_(torch.stack([loss.detach(), right, norm]))

    @torch.no_grad()
    def update(self, gradient: Tensor) -> Tensor:
        """AdamW with a clipped gradient; returns the gradient's norm. A gradient that is not finite counts as zero."""
        norm = gradient.norm()
        gradient.mul_((CLIP / (norm + 1e-6)).clamp(max=1)).nan_to_num_(0, 0, 0)
        self.step.add_(1)
        self.first.lerp_(gradient, 1 - BETA_1)
        self.second.lerp_(gradient.square_(), 1 - BETA_2)
        first = self.first / (1 - torch.exp(self.step * math.log(BETA_1)))
        second = self.second / (1 - torch.exp(self.step * math.log(BETA_2)))
        direction = first / (second.sqrt() + 1e-8) + WEIGHT_DECAY * self.master
        self.master.sub_(self.rate * direction)
        self.average.add_((self.master - self.average) * (1 / self.step).clamp(min=SHORTEST_AVERAGE))
        return norm

    @torch.no_grad()
    def exact(self, batch: Batch, pixels: Tensor) -> Tensor:
        """Which answers of a batch the averaged weights give right, each token after the right ones: bool [B]."""
        weights = self.views(self.average.to(self.dtype))
        images = photograph(batch.signs.to(self.device), pixels, batch.size)
        logits = self.forward(weights, self.tables_of(batch.size), images, batch.tail.to(self.device))
        return all_right(logits, batch.labels.to(self.device))

    def state(self) -> dict[str, Tensor]:
        """The vectors that training goes on from, not copied."""
        return {name: getattr(self, name) for name in ("master", "first", "second", "average", "step")}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, value in self.state().items():
            value.copy_(state[name])
