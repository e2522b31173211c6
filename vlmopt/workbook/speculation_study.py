"""Speculative decoding: what drafts are worth on the embedded model, what verifying them costs, and where that pays."""

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm.auto import tqdm

import vlmopt
from vlmopt import OptimizeConfig
from vlmopt.bench import models
from vlmopt.bench.timing import interleave, quantiles, timed
from vlmopt.runtime.acceptance import accept_drawn, break_even, tokens_a_step
from vlmopt.runtime.drafters import Drafter, DraftModel
from vlmopt.runtime.eagle import Eagle
from vlmopt.runtime.eagle_head import Head
from vlmopt.runtime.generate import ENGINES, Engine
from vlmopt.runtime.graphs import capture
from vlmopt.runtime.speculate import LADDER, SPARE, Speculation
from vlmopt.workbook import plots
from vlmopt.workbook.answers import ANSWER_TOKENS, new_ids
from vlmopt.workbook.eagle_train import save
from vlmopt.workbook.kernel_study import Bench
from vlmopt.workbook.record import Record

PLAIN, LOOKUP, ITSELF = "plain", "prompt lookup", "the model itself"
NOISY, SHORTER, EAGLE = "noise 1.0", "first 3 layers", "EAGLE-3 head"
READ_ALL = "read_all"
DRAFTED = 4
"""Tokens that a step drafts where acceptance is measured."""
MOST = 7
VERIFY, WITH_LOOKUP = "verify alone", "with prompt lookup"
CHEAP = 1 / 64
"""A step's cost at which it gains whatever it drafts."""
STEPS = 8
"""Steps that are timed as one."""
AIM, LIMIT = 1.06, 1.15
"""A verify step of 4 rows in plain steps, on a GPU: what is predicted, and what is allowed."""
ROWS_AIMED = 4
PREDICTED = {LOOKUP: 0.1, ITSELF: 1.0, EAGLE: 0.8}
"""Acceptance where all signs are read."""
CHI_SQUARE = 37.7
"""What one right sampler in a thousand exceeds, over 15 degrees of freedom."""


@dataclass(frozen=True)
class Drafted:
    """One model that decodes with drafts, always of so many tokens, and the one that decodes plainly."""

    plain: models.Loaded
    drafting: models.Loaded
    draft_model: nn.Module | None = None
    own_cost: float = 0.0
    """What the drafter takes for a token, in plain steps: its share of the model's layers, or of what a step reads."""

    @property
    def speculation(self) -> Speculation:
        """What counts."""
        return ENGINES[self.drafting.model].speculation

    def draft_always(self, k: int) -> None:
        """From now on every step drafts k tokens."""
        self.speculation.costs = {0: 1.0, k: CHEAP}


def _copy(loaded: models.Loaded, config: OptimizeConfig) -> models.Loaded:
    twin = replace(loaded, model=copy.deepcopy(loaded.model))
    vlmopt.optimize(twin.model, config)
    return twin


@torch.no_grad()
def _noisy(model: nn.Module, seed: int) -> nn.Module:
    """A copy to whose layers' weights as much noise is added as they spread by themselves."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in twin.model.language_model.layers.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(noise * parameter.float().std().item())
    return twin


def _shorter(model: nn.Module, layers: int) -> nn.Module:
    """A copy that leaves out all but its first layers."""
    twin = copy.deepcopy(model)
    twin.model.language_model.layers = twin.model.language_model.layers[:layers]
    twin.config.text_config.num_hidden_layers = layers
    return twin


def drafters(loaded: models.Loaded, seed: int, head: Head) -> dict[str, Drafted]:
    """Prompt lookup; as draft models the model itself, a copy with noise on its weights and its first layers; a head.

    None of the draft models was trained for it: they show what a trained one of that acceptance would give.
    """
    exact, lookup = OptimizeConfig.preset("exact"), OptimizeConfig.preset("exact", speculate="lookup")
    plain, layers = _copy(loaded, exact), len(loaded.model.model.language_model.layers)
    found = {LOOKUP: Drafted(plain, _copy(loaded, lookup))}
    others = {
        ITSELF: copy.deepcopy(loaded.model),
        NOISY: _noisy(loaded.model, seed),
        SHORTER: _shorter(loaded.model, layers - 1),
    }
    for name, other in others.items():
        vlmopt.optimize(other, exact)
        drafting = _copy(loaded, lookup)
        engine = ENGINES[drafting.model]
        engine.speculation = Speculation(engine, DraftModel(ENGINES[other], other))
        found[name] = Drafted(plain, drafting, other, len(other.model.language_model.layers) / layers)
    drafting, text = _copy(loaded, lookup), loaded.model.model.language_model
    engine = ENGINES[drafting.model]
    engine.speculation = Speculation(engine, Eagle(engine, head))
    read = _numbers(text.layers) + _numbers(loaded.model.lm_head)
    found[EAGLE] = Drafted(plain, drafting, own_cost=_numbers(head) / read)
    return found


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def pick(samples: Any, read_all: int, each: int) -> dict[str, list[int]]:
    """The first samples of every kind of question: `read_all` of those with long answers, `each` of the others."""
    found: dict[str, list[int]] = {READ_ALL: []}
    for index in range(len(samples)):
        own = found.setdefault(samples.text(index)["kind"], [])
        if len(own) < (read_all if samples.text(index)["kind"] == READ_ALL else each):
            own.append(index)
    return found


def same_answers(
    field: Mapping[str, Drafted], samples: Any, picked: Mapping[str, Sequence[int]]
) -> tuple[dict[str, int], dict[tuple[str, str], Counter[str]]]:
    """Answers whose ids differ from plain decoding's by drafter; what was counted by drafter and kind of question."""
    differing, counted = dict.fromkeys(field, 0), {}
    plain = next(iter(field.values())).plain
    for subject in field.values():
        subject.draft_always(DRAFTED)
    for kind, indices in tqdm(picked.items(), desc="answers with drafts", leave=False):
        expected = [new_ids(plain, samples[index], ANSWER_TOKENS) for index in indices]
        for name, subject in field.items():
            subject.speculation.counts.clear()
            for index, ids in zip(indices, expected, strict=True):
                differing[name] += new_ids(subject.drafting, samples[index], ANSWER_TOKENS) != ids
            counted[name, kind] = Counter(subject.speculation.counts)
            counted[name, kind]["tokens"] = sum(len(ids) - 1 for ids in expected)
    return differing, counted


def other_ids(loaded: models.Loaded, samples: Any, count: int) -> int:
    """Of the first `count` samples, on a GPU, those whose ids differ between plain steps and prompt lookup by kernels;
    each with another number of drafts."""
    config = kernel_config(on_gpu=True)
    plain, drafting = _copy(loaded, config.model_copy(update={"speculate": "none"})), _copy(loaded, config)
    differing = 0
    for index in tqdm(range(count), desc="answers of the kernels", leave=False):
        ENGINES[drafting.model].speculation.costs = {0: 1.0, LADDER[1 + index % 3]: CHEAP}
        expected = new_ids(plain, samples[index], ANSWER_TOKENS)
        differing += new_ids(drafting, samples[index], ANSWER_TOKENS) != expected
    return differing


def accepted(record: Record) -> list[dict[str, Any]]:
    """One row a kind of question and drafter."""
    metrics = ("draft_share", "acceptance", "tokens_a_step")
    rows = []
    for row in record.find("tokens_a_step"):
        name, kind = row["provider"], row["case"]
        found = {metric: record.find(metric, name, kind) for metric in metrics}
        told = {metric: each[0]["p50"] if each else None for metric, each in found.items()}
        rows.append({"question": kind, "drafter": name, **told})
    return rows


def measure_acceptance(record: Record, counted: Mapping[tuple[str, str], Counter[str]]) -> None:
    """Adds by kind and drafter: `acceptance` of drafted tokens up to the first that fails, `draft_share` of steps with
    something to draft, and `tokens_a_step` after the first token."""
    for (name, kind), seen in counted.items():
        if not seen["steps"]:
            continue
        record.measure(kind, name, "draft_share", "share", [seen["drafts"] / seen["steps"]])
        record.measure(kind, name, "tokens_a_step", "tokens", [seen["tokens"] / seen["steps"]])
        if seen["tried"]:
            record.measure(kind, name, "acceptance", "share", [seen["held"] / seen["tried"]])


def draws_off(seed: int, draws: int = 2000) -> float:
    """χ² of pairs of tokens that come out of drawn drafts against the model's own distribution, over 4 tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        p, q = torch.randn(5, 4).double().softmax(-1), torch.randn(1, 4).double().softmax(-1)
        counts = torch.zeros(4, 4)
        for _ in range(draws):
            draft = torch.multinomial(q[0], 1)
            held, token = accept_drawn(draft, q, torch.stack([p[4], p[draft[0]]]))
            first = draft[0] if held else token[0]
            counts[first, token[0] if held else torch.multinomial(p[first], 1)[0]] += 1
    expected = draws * p[4, :, None] * p[:4]
    return ((counts - expected) ** 2 / expected).sum().item()


class Nothing(Drafter):
    """Drafts zeros at no cost."""

    def __call__(self, history: Tensor, row: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `drafters.Drafter`."""
        return history.new_zeros(k), history.new_zeros(1).bool()


def kernel_config(on_gpu: bool) -> OptimizeConfig:
    """`fast` with prompt lookup; on a CPU the references."""
    if not on_gpu:
        return OptimizeConfig.preset("exact", packed=True, speculate="lookup")
    return OptimizeConfig.preset("fast", speculate="lookup")


def measure_steps(
    record: Record, loaded: models.Loaded, bench: Bench, position: int, ks: Sequence[int], rounds: int
) -> str:
    """Adds `step_ms` by number of drafted tokens (`ks`, of which the first is 0), verified alone and drafted by prompt
    lookup, and `cost`, the same in plain steps; gives the model's name with the position.

    On a GPU steps are replays one behind the other, on a CPU calls.
    """
    vlmopt.optimize(loaded.model, kernel_config(bench.on_gpu))
    engine, runs = ENGINES[loaded.model], {}
    with torch.no_grad():
        engine.reserve(position + STEPS * (MOST + 1) + SPARE)
        engine.cache.buffer.normal_()
        for who, speculation in ((VERIFY, Speculation(engine, Nothing())), (WITH_LOOKUP, engine.speculation)):
            for k in ks if who == VERIFY else ks[1:]:
                runs[who, k] = partial(_step_ms, speculation, _launch(engine, speculation, k, position), position)
        times = interleave(runs, rounds)
    vlmopt.revert(loaded.model)
    name = f"{loaded.name} at {position:,}"
    base = quantiles(times[VERIFY, 0])["p50"]
    for (who, k), values in times.items():
        record.measure(drafted(name, k), who, "step_ms", "ms", values)
        record.measure(drafted(name, k), who, "cost", "plain steps", [value / base for value in values])
    for row in record.find("cost", VERIFY)[1:]:
        k = int(row["case"].split()[-1])
        record.measure(row["case"], VERIFY, "break_even", "share", [min(1.0, break_even(row["p50"], k))])
    return name


def drafted(name: str, k: int) -> str:
    """The case of steps that draft k tokens."""
    return f"{name}, drafted {k}"


def _launch(engine: Engine, speculation: Speculation, k: int, position: int) -> Callable[[], None]:
    step = partial(speculation.step, k, engine.cache.capacity)
    if engine.graphs is None:
        return step
    _set(speculation, position)
    return capture(step, 1, engine.device, None, "speculate").replay


def _set(speculation: Speculation, position: int) -> None:
    speculation.row.fill_(position)
    speculation.limit.fill_(position + STEPS * (MOST + 1))


def _step_ms(speculation: Speculation, run: Callable[[], None], position: int) -> float:
    _set(speculation, position)

    def several() -> None:
        for _ in range(STEPS):
            run()

    return timed(several, speculation.row.device)[1] / STEPS


def measure_answers(
    record: Record, loaded: models.Loaded, head: Head, samples: Any, indices: Sequence[int], bench: Bench, rounds: int
) -> None:
    """Adds `answer_ms` of whole answers to these samples: plain, with prompt lookup, with a head."""
    config = kernel_config(bench.on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        changes = {PLAIN: {"speculate": "none"}, LOOKUP: {}}
        changes[EAGLE] = {"speculate": "eagle", "draft_head": save(head, folder)}
        field = {name: _copy(loaded, config.model_copy(update=change)) for name, change in changes.items()}

    def all_of(target: models.Loaded) -> float:
        return timed(lambda: [new_ids(target, samples[i], ANSWER_TOKENS) for i in indices], loaded.device)[1]

    runs = {name: partial(all_of, target) for name, target in field.items()}
    interleave(runs, 1)
    for name, values in interleave(runs, rounds).items():
        per_answer = [value / len(indices) for value in values]
        record.measure(f"{loaded.name}, {READ_ALL}", name, "answer_ms", "ms", per_answer)


def measure_gains(record: Record, own_costs: Mapping[str, float]) -> None:
    """Adds by kind and drafter, at the measured acceptance, draft share and costs and with the number of drafted tokens
    that suits best: `speedup_of_verifying`, as if a draft model took no time, and `speedup`, with its `own_costs`."""
    for row in record.find("acceptance"):
        name, kind = row["provider"], row["case"]
        found = record.value("draft_share", name, kind)
        verified = costs(record, WITH_LOOKUP if name == LOOKUP else VERIFY)
        tokens = {k: 1 - found + found * tokens_a_step(row["p50"], k) for k in verified if k}
        for metric, own in (("speedup_of_verifying", 0.0), ("speedup", own_costs[name])):
            gains = [gained / (verified[k] + own * k) for k, gained in tokens.items()]
            record.measure(kind, name, metric, "x", [max(gains)])


def costs(record: Record, who: str) -> dict[int, float]:
    """Plain steps that a step takes, by number of drafted tokens."""
    return {int(row["case"].split()[-1]): row["p50"] for row in record.find("cost", who)}


@plots.styled
def figure(record: Record) -> Figure:
    """Speed-up over the acceptance of drafts: a line for every number of drafted tokens, from measured costs, and a dot
    for every drafter and kind of question."""
    figure, (axes,) = plots.canvas(7.2, 3.2)
    chances = [i / 50 for i in range(51)]
    for k, cost in costs(record, VERIFY).items():
        if k:
            gains = [tokens_a_step(chance, k) / cost for chance in chances]
            axes.plot(chances, gains, color=plots.GREY, lw=0.5 + 0.2 * k)
            axes.annotate(str(k), (1, gains[-1]), (3, -3), textcoords="offset points", fontsize=7.5)
    rows = record.find("speedup_of_verifying")
    for name, colour in plots.colours(list(dict.fromkeys(row["provider"] for row in rows))).items():
        own = [row for row in rows if row["provider"] == name]
        places = [record.value("acceptance", name, row["case"]) for row in own]
        axes.plot(places, [row["p50"] for row in own], "o", ms=4, color=colour, label=name)
    axes.axhline(1, ls="--", lw=1, color="black")
    axes.set_xlabel("acceptance: share of drafted tokens that hold, up to the first that fails")
    axes.set_ylabel("speed-up of verifying")
    axes.set_xlim(0, 1.04)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    plots.head(figure, "grey: by number of drafted tokens, at their measured cost", record)
    return figure


def predictions(name: str, bench: Bench) -> list[tuple[str, float, str]]:
    """What `Record.predict` takes: the cost of 4 rows at this case, and two drafters' acceptance."""
    cost = rows_aimed(name), AIM if bench.on_gpu else 1.3, "plain steps"
    return [cost, *((f"acceptance of {drafter} on {READ_ALL}", share, "share") for drafter, share in PREDICTED.items())]


def rows_aimed(name: str) -> str:
    """The name of the prediction for a step's cost."""
    return f"a step of {ROWS_AIMED} rows, {name}"


def settle(record: Record, name: str) -> None:
    """Puts what was measured beside the predictions."""
    record.settle(rows_aimed(name), record.value("cost", VERIFY, drafted(name, ROWS_AIMED - 1)))
    for drafter in PREDICTED:
        if record.find("acceptance", drafter, READ_ALL):
            record.settle(f"acceptance of {drafter} on {READ_ALL}", record.value("acceptance", drafter, READ_ALL))


def conclude(record: Record, name: str, bench: Bench) -> tuple[str, str]:
    """Answer and verdict from the record; drafters that lose are listed."""
    n = plots.number
    case = drafted(name, ROWS_AIMED - 1)
    cost, even = record.value("cost", VERIFY, case), record.value("break_even", VERIFY, case)
    gains = {row["provider"]: row["p50"] for row in record.find("speedup", case=READ_ALL)}
    for drafter, gain in gains.items():
        if gain <= 1:
            share = record.value("acceptance", drafter, READ_ALL)
            record.lose(
                drafter, f"{share:.0%} of its drafts hold on {READ_ALL}: a speed-up of {n(gain)} at what it costs"
            )
    looked_up = n(gains[LOOKUP]) if LOOKUP in gains else "nothing, since it finds nothing"
    perfect = record.value("speedup_of_verifying", ITSELF, READ_ALL)
    answer = (
        f"Verifying {ROWS_AIMED} rows costs {n(cost)} plain steps ({name}), paid for where {even:.0%} of drafts hold. "
        f"Where all signs are read, prompt lookup gives a speed-up of {looked_up}, the head {n(gains[EAGLE])}; drafts "
        f"that always hold and take no time would give {n(perfect)}."
    )
    times = {row["provider"]: row["p50"] for row in record.find("answer_ms")}
    whole = f"Whole answers: {n(times[PLAIN])} ms plainly, {n(times[LOOKUP])} with prompt lookup that adapts itself, "
    whole += f"{n(times[EAGLE])} with the head. "
    if not bench.on_gpu:
        return answer, whole + "Ids are the same; no speed is claimed from a CPU."
    fault = "" if cost <= LIMIT else f" A step of {ROWS_AIMED} rows costs more than the {LIMIT} allowed."
    return answer, whole + "Ids are the same, so it may be switched on where text repeats itself." + fault


def one(record: Record, k: int, acceptance: float) -> dict[str, Any]:
    """What drafting k tokens of this acceptance would give at the measured costs, for a panel."""
    cost = costs(record, VERIFY).get(k, float("nan"))
    return {"drafted": k, "acceptance": acceptance, "cost": cost, "speed-up": tokens_a_step(acceptance, k) / cost}
