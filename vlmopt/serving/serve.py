"""`./run.sh serve`: vLLM's OpenAI-compatible server with our scheduler, for a model of a `models.json` or a folder.

Every option that is not ours goes to vLLM's server as it stands, such as `--port`, `--tensor-parallel-size`,
`--data-parallel-size`, `--distributed-executor-backend ray` or `--max-num-queued-reqs`.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from vlmopt.errors import VlmoptError
from vlmopt.serving.admission import parse_policy
from vlmopt.serving.models import MODELS, ModelEntry, as_flags, choose, engine_arguments, load_models

SERVER = "vllm.entrypoints.openai.api_server"
_OURS = ("--scheduler-cls", "--additional-config", "--model")


def main(arguments: list[str] | None = None) -> int:
    """Become vLLM's server; returns (2) only if what is asked makes no sense."""
    options, others = _parser().parse_known_args(arguments)
    try:
        flags = server_flags(options, others)
        if importlib.util.find_spec("vllm") is None:
            raise VlmoptError("vLLM is not installed here; start the server with ./run.sh serve")
    except VlmoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *flags])


def server_flags(options: argparse.Namespace, others: list[str]) -> list[str]:
    """Flags of vLLM's server.

    Raises:
        VlmoptError: an unknown model or policy, or a flag among `others` that would undo what is asked.
    """
    for flag in _OURS:
        if any(other.partition("=")[0].replace("_", "-") == flag for other in others):
            raise VlmoptError(f"{flag} is made from the model's name and --policy; leave it out")
    name, entry = _entry(options)
    admission = parse_policy(options.policy)
    if isinstance(entry.slo, float):
        admission = {"slo": entry.slo, **admission}
    made = engine_arguments(
        entry,
        admission,
        speculate=not options.disable_spec_decoding,
        attention_backend=options.attention_backend,
    )
    return [*as_flags({"served_model_name": name, **made}), *others]


def _entry(options: argparse.Namespace) -> tuple[str, ModelEntry]:
    folder = Path(options.model)
    models = load_models(options.models)
    if options.model not in models and (folder / "config.json").is_file():
        return folder.resolve().name, ModelEntry(model_path=folder)
    return options.model, choose(models, [options.model])[options.model]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run.sh serve",
        description="Serve a model with vLLM's OpenAI-compatible server and our admission. Other options go to vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a name in models.json, or a model's folder")
    parser.add_argument("--models", type=Path, default=MODELS, metavar="PATH", help="a models.json")
    parser.add_argument("--policy", default="reserve", help="such as reserve or fcfs:watermark=0.05 (default: reserve)")
    parser.add_argument("--disable-spec-decoding", action="store_true", help="leave out the entry's")
    parser.add_argument("--attention_backend", "--attention-backend", metavar="NAME", help="vLLM's attention backend")
    return parser


if __name__ == "__main__":
    sys.exit(main())
