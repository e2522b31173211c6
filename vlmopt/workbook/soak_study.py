"""Thousands of requests of random shapes in one process: memory stays flat, what is held stays bounded, and the last
are as fast as the first.

python -m vlmopt.workbook.soak_study --requests 3000 --preset fast    on a GPU; writes figures/<device>/soak.json
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm.auto import tqdm

import vlmopt
from vlmopt.bench.models import TINY, Loaded, load
from vlmopt.bench.protocol import quiet_generation
from vlmopt.bench.system_info import environment
from vlmopt.bench.timing import timed
from vlmopt.errors import VlmoptError
from vlmopt.files import require_writable, write_atomic
from vlmopt.runtime.generate import ENGINES
from vlmopt.workbook import plots
from vlmopt.workbook.conversations import padded
from vlmopt.workbook.record import folder

FILE = "soak.json"
COMPARED = 100
"""Requests after the warm-up that come again at the end."""
SLOWER, GROWN_MB, GRAPHS = 1.05, 16, 16
"""How the last may compare with the first, how much more memory may be held than after the warm-up, and how many
captured graphs."""
SIDE, IMAGES, LETTERS, LIMITS = 640, 3, 600, (1, 4, 16, 64)
"""Of a request at most: pixels a side, images a prompt, letters; and its numbers of new tokens."""
LOOKS = 20
"""How often memory and what is held are looked at."""


@dataclass(frozen=True)
class Call:
    """One request: sides of its images by prompt, letters of its texts, options of `generate`."""

    images: tuple[tuple[tuple[int, int], ...], ...]
    letters: int
    options: dict[str, Any]


def draw(rng: Random) -> Call:
    """A request that `rng` alone decides: one prompt, or at times two, of no image to three and some text."""
    prompts = 2 if rng.random() < 0.1 else 1
    images = tuple(
        tuple((rng.randint(8, SIDE), rng.randint(8, SIDE)) for _ in range(rng.choice((0, 1, 1, 1, 2, IMAGES))))
        for _ in range(prompts)
    )
    options: dict[str, Any] = {"max_new_tokens": rng.choice(LIMITS), "do_sample": rng.random() < 0.1}
    return Call(images, rng.randint(1, LETTERS), options)


def largest(prompts: int) -> Call:
    """The largest request of so many prompts that `draw` can give."""
    return Call(((((SIDE, SIDE),) * IMAGES),) * prompts, LETTERS, {"max_new_tokens": max(LIMITS), "do_sample": False})


def inputs_of(loaded: Loaded, call: Call) -> dict[str, torch.Tensor]:
    """What `generate` gets for the request."""
    prompts = []
    for sides in call.images:
        content = [{"type": "image", "image": _noise(*side)} for side in sides]
        content.append({"type": "text", "text": "a" * call.letters})
        chat = [{"role": "user", "content": content}]
        options = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        prompts.append(dict(loaded.processor.apply_chat_template(chat, **options).to(loaded.device)))
    return prompts[0] if len(prompts) == 1 else padded(prompts, loaded.processor.tokenizer.pad_token_id)


def _noise(height: int, width: int) -> Image.Image:
    values = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def compared(requests: int) -> slice:
    """Of so many requests those that come again at the end: `COMPARED`, or fewer, after a tenth as a warm-up."""
    first = requests // 10
    return slice(first, first + min(COMPARED, requests // 4))


def calls(requests: int, seed: int) -> list[Call]:
    """The warm-up, those `compared`, others, and the `compared` again.

    The largest come first, so that whatever grows to the largest request has done so.
    """
    again = compared(requests)
    drawn = [draw(Random(f"{seed}/{number}")) for number in range(requests - (again.stop - again.start))]
    drawn[:2] = largest(2), largest(1)
    return drawn + drawn[again]


def look(loaded: Loaded, number: int) -> dict[str, Any]:
    """Memory in MB and what the engine holds after `number` requests."""
    engine, on_gpu = ENGINES[loaded.model], loaded.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "requests": number,
        "device_mb": torch.cuda.memory_allocated(loaded.device) / 1e6 if on_gpu else 0.0,
        "host_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "graphs": 0 if engine.graphs is None else len(engine.graphs),
        "grid_tables": len(engine.grids),
        "cache_rows": engine.cache.capacity,
    }


def study(loaded: Loaded, requests: int, seed: int, progress: Callable = tqdm) -> dict[str, Any]:
    """Serves the requests by the optimised model; `levels`, the times of the compared requests, and who served."""
    served, again = calls(requests, seed), compared(requests)
    every, times, levels = max(1, requests // LOOKS), [], []
    for number, call in enumerate(progress(served, desc="requests", leave=False), 1):
        inputs = inputs_of(loaded, call)
        torch.manual_seed(0)  # the compared requests are to give the same answers again
        times.append(
            timed(lambda inputs=inputs, call=call: loaded.model.generate(**inputs, **call.options), loaded.device)[1]
        )
        if number >= again.stop and (number % every == 0 or number == requests):
            levels.append(look(loaded, number))
    first = times[again]
    last = times[-len(first) :]
    ratio = statistics.median(b / a for a, b in zip(first, last, strict=True))
    counts = vlmopt.status(loaded.model).calls
    told = {"requests": requests, "seed": seed, "served": counts["stages"], "handed_to_stock": counts["stock"]}
    times_told = {"first_ms": statistics.median(first), "last_ms": statistics.median(last), "last_to_first": ratio}
    return {**told, **times_told, "levels": levels}


def require(found: dict[str, Any]) -> None:
    """Holds a study to what it may show.

    Raises:
        VlmoptError: memory or the held graphs grew, or the last requests took longer than the first.
    """
    levels = found["levels"]
    grown = max(level["device_mb"] for level in levels) - levels[0]["device_mb"]
    if grown > GROWN_MB:
        raise VlmoptError(f"{grown:.1f} MB more are held than after the warm-up, at most {GROWN_MB} may be")
    if levels[-1]["graphs"] > GRAPHS:
        raise VlmoptError(f"{levels[-1]['graphs']} graphs are held, at most {GRAPHS} may be")
    if found["last_to_first"] > SLOWER:
        raise VlmoptError(f"the last requests take {found['last_to_first']:.2f} times what the same took at first")


def write(found: dict[str, Any], loaded: Loaded, output: str | Path = "") -> Path:
    """Writes the record beside the notebooks' records of this device, or into `output`/<device>."""
    machine, status = environment(loaded.device), vlmopt.status(loaded.model)
    content = {"schema": 1, "weights": loaded.name, "preset": status.config.name, "class": status.cls, **found}
    content["environment"] = machine
    path = folder("full", machine["device"], output) / FILE
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def read(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        VlmoptError: it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        require(content)
        return content | {"device": content["environment"]["device"]}
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise VlmoptError(f"cannot read the record {path} ({error!r}); run soak_study again") from error


def told(content: dict[str, Any]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Of a record: what it says, and what was held after the compared requests and at the end."""
    lead = (
        f"{content['requests']:,} requests of random shapes in one process, by `{content['preset']}` "
        f"({content['class']}) with the weights {content['weights']}: {content['served']:,} served by the stages, "
        f"{content['handed_to_stock']:,} handed to stock. The last take {content['last_to_first']:.3f} times what the "
        f"same took after the warm-up."
    )
    levels = [content["levels"][0], content["levels"][-1]]
    return lead, [{key: plots.number(value) for key, value in level.items()} for level in levels], []


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the record is written, 1 when something grew or slowed down, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m vlmopt.workbook.soak_study", description=__doc__)
    parser.add_argument("--requests", type=int, default=3000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--model", default=str(TINY), metavar="PATH", help="a folder, or random-2b (default: embedded)")
    parser.add_argument("--output", default="", metavar="DIR", help="folder for the record, instead of figures/")
    options = parser.parse_args(argv)
    try:
        if options.requests < 40:
            raise VlmoptError("a soak of fewer than 40 requests says nothing; ask for more")
        loaded = load(options.model)
        require_writable(folder("full", environment(loaded.device)["device"], options.output) / FILE)
        vlmopt.optimize(loaded.model, vlmopt.OptimizeConfig.preset(options.preset, strict=False))
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with quiet_generation():
        found = study(loaded, options.requests, options.seed)
    try:
        require(found)
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(write(found, loaded, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
