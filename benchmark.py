"""The contest's benchmark: time to first token, throughput and answers of the model in `evaluation_wrapper.py`.

Writes result.json as the run goes; a killed run goes on with --resume.
"""

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def parser() -> argparse.ArgumentParser:
    """The flags; nothing heavy is imported before they are parsed."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model-path", default="./Qwen3-VL-2B-Instruct", help="model folder, or random-2b")
    flags.add_argument("--dataset-path", default="./data", help="folder that datasets.load_from_disk opens")
    flags.add_argument("--output", default="result.json", help="where the result goes")
    flags.add_argument("--num-samples", type=int, default=100, metavar="N", help="the first N samples, in order")
    flags.add_argument("--random-seed", type=int, default=42, metavar="S", help="seed of PyTorch's generators")
    mode = flags.add_mutually_exclusive_group()
    mode.add_argument("--stock", action="store_true", help="measure the model as transformers ships it, nothing else")
    mode.add_argument("--compare", action="store_true", help="measure stock and ours, interleaved per sample")
    flags.add_argument("--preset", metavar="NAME", help="optimise with this preset instead of the wrapper's own")
    flags.add_argument("--device", metavar="D", help="cuda:N or cpu; by default the first GPU where there is one")
    flags.add_argument("--resume", action="store_true", help="go on where a killed run of the same settings was")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run and print the summary. 0: done; 1: every sample failed; 2: an error of one sentence; 130: interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    flags = parser().parse_args(arguments)
    if flags.stock and flags.preset:
        parser().error("--preset says how ours is optimised; it does not go with --stock")
    try:
        return _run(flags)
    except KeyboardInterrupt:
        again = shlex.join([a for a in arguments if a != "--resume"] + ["--resume"])
        print(f"\ninterrupted; what is measured is kept, go on with: python {sys.argv[0]} {again}", file=sys.stderr)
        return 130


def _run(flags: argparse.Namespace) -> int:
    from vlmopt.bench import protocol, result
    from vlmopt.errors import VlmoptError

    options = protocol.Options(
        model_path=flags.model_path,
        dataset_path=flags.dataset_path,
        output=flags.output,
        num_samples=flags.num_samples,
        seed=flags.random_seed,
        mode="stock" if flags.stock else "compare" if flags.compare else "ours",
        preset=flags.preset,
        device=flags.device,
        resume=flags.resume,
    )
    try:
        content = protocol.run(options, _wrapper)
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(result.table(content))
    print(f"written to {flags.output}")
    return 1 if content["performance"]["measured_samples"] == 0 else 0


def _wrapper(*arguments: str, **options: str) -> object:
    from evaluation_wrapper import VLMModel

    return VLMModel(*arguments, **options)


if __name__ == "__main__":
    sys.exit(main())
