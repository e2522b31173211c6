"""What can be served: the entries of `models.json`, checked, and as vLLM's engine arguments. Free of vLLM.

    {"MiniCPM-8B-Spec": {
        "model_path": "models/MiniCPM4-8B",
        "speculative_decoding": {"draft_model_path": "models/MiniCPM4-0.5B", "num_speculative_tokens": 5},
        "kv_cache_dtype": "fp8", "slo": 30, "engine": {"max_model_len": 8192}}}

Relative paths count from the current folder. `engine` holds any further arguments of vLLM's engine by its own names.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vlmopt.errors import VlmoptError
from vlmopt.serving.workload import ABSOLUTE_SLO

MODELS = Path(__file__).with_name("models.json")
SCHEDULER = "vlmopt.serving.scheduler.policy_scheduler"
# Arguments that an entry must not give in `engine`, since these are made from other fields.
_OURS = ("model", "speculative_config", "kv_cache_dtype", "load_format", "scheduler_cls", "additional_config")


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                nearest = difflib.get_close_matches(name, cls.model_fields, 1, 0)[0]
                raise ValueError(f"unknown field {name!r}, the nearest is {nearest!r}")
        return values


class Speculation(_Checked):
    """Speculative decoding: by a smaller model, by the n-grams of the prompt, or by an EAGLE-3 head."""

    method: Literal["draft_model", "ngram", "eagle3"] = "draft_model"
    num_speculative_tokens: int = Field(ge=1)
    draft_model_path: Path | None = None
    prompt_lookup_min: int | None = Field(None, ge=1)
    prompt_lookup_max: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _fits_its_method(self) -> "Speculation":
        by_ngram = self.method == "ngram"
        if by_ngram and self.draft_model_path is not None:
            raise ValueError("the method 'ngram' takes no draft_model_path")
        if not by_ngram and self.draft_model_path is None:
            raise ValueError(f"the method {self.method!r} needs a draft_model_path")
        if not by_ngram and (self.prompt_lookup_min or self.prompt_lookup_max):
            raise ValueError("prompt_lookup_min and prompt_lookup_max are for the method 'ngram'")
        return self

    def as_vllm(self) -> dict[str, Any]:
        """vLLM's `speculative_config`."""
        values = self.model_dump(exclude_none=True, exclude={"draft_model_path"})
        return values if self.draft_model_path is None else {**values, "model": str(self.draft_model_path)}


class RelativeSlo(_Checked):
    """An objective of `times_unloaded` times the latency that a request of its kind has on the idle engine."""

    times_unloaded: float = Field(gt=0)


class ModelEntry(_Checked):
    """One model as it is to be served.

    Attributes:
        slo: seconds from arrival to the last token, the same for every request, or relative to the idle engine.
        load_format: "dummy" serves random weights in the shape of `config.json`: speed is honest, answers mean nothing.
        max_tokens: of an answer, at most.
    """

    model_path: Path
    speculative_decoding: Speculation | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    slo: RelativeSlo | float = ABSOLUTE_SLO
    load_format: Literal["auto", "dummy"] = "auto"
    max_tokens: int = Field(2048, ge=1)
    engine: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _means_something(self) -> "ModelEntry":
        if isinstance(self.slo, float) and not 0 < self.slo < float("inf"):
            raise ValueError("slo is in seconds, above 0 and finite")
        if taken := sorted(set(self.engine) & set(_OURS)):
            raise ValueError(f"{' and '.join(taken)} cannot stand in 'engine', other fields say it")
        return self

    def missing(self) -> list[str]:
        """Folders that the entry names and that hold no model."""
        speculation = self.speculative_decoding
        draft = None if speculation is None else speculation.draft_model_path
        folders = [path for path in (self.model_path, draft) if path is not None]
        return [str(folder) for folder in folders if not (folder / "config.json").is_file()]

    def has_vision(self) -> bool:
        """Whether the model reads images, as its `config.json` says."""
        try:
            return "vision_config" in json.loads((self.model_path / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise VlmoptError(
                f"cannot read {self.model_path / 'config.json'} ({error}); fetch the model again"
            ) from error


def load_models(path: str | Path = MODELS) -> dict[str, ModelEntry]:
    """Read a `models.json`.

    Raises:
        VlmoptError: no such file, not an object of entries, or an entry with an unknown or bad field, which is named.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise VlmoptError(f"cannot read {path} ({error.strerror}); pass the path of a models.json") from error
    except ValueError as error:
        raise VlmoptError(f"{path} is not JSON ({error}); put it right") from error
    if not isinstance(content, dict) or not content:
        raise VlmoptError(f"{path} is not an object of at least one model by name; put it right")
    return {name: _entry(name, values, path) for name, values in content.items()}


def choose(models: Mapping[str, ModelEntry], names: list[str] | None) -> dict[str, ModelEntry]:
    """The entries of these names (None: all), once it is sure that their folders are there.

    Raises:
        VlmoptError: an unknown name, the nearest is named; or a folder that is missing.
    """
    for name in names or ():
        if name not in models:
            nearest = difflib.get_close_matches(name, models, 1, 0)[0]
            raise VlmoptError(f"there is no model {name!r} in models.json; the nearest is {nearest!r}")
    chosen = {name: models[name] for name in names or models}
    if missing := {folder: name for name, entry in chosen.items() for folder in entry.missing()}:
        listed = ", ".join(f"{folder} (of {name})" for folder, name in missing.items())
        raise VlmoptError(f"no model lies in {listed}; fetch it, put its path right, or choose with --models-to-test")
    return chosen


def engine_arguments(
    entry: ModelEntry,
    admission: Mapping[str, Any],
    *,
    speculate: bool = True,
    attention_backend: str | None = None,
) -> dict[str, Any]:
    """Arguments of vLLM's engine for an entry, by vLLM's names.

    Args:
        admission: settings of the scheduler, as `admission.Settings.make` takes them.
        speculate: False leaves the entry's speculative decoding out.
        attention_backend: vLLM's name of one, in any case; None lets vLLM choose.
    """
    arguments: dict[str, Any] = {
        "model": str(entry.model_path),
        "load_format": entry.load_format,
        "kv_cache_dtype": entry.kv_cache_dtype,
        "scheduler_cls": SCHEDULER,
        "additional_config": {"vlmopt": dict(admission)},
    }
    if speculate and entry.speculative_decoding is not None:
        arguments["speculative_config"] = entry.speculative_decoding.as_vllm()
    if attention_backend is not None:
        arguments["attention_backend"] = attention_backend.upper()
    if entry.has_vision():
        arguments["limit_mm_per_prompt"] = {"image": 1, "video": 0}
    return {**arguments, **entry.engine}


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """The same arguments as flags of vLLM's server."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            flags += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _entry(name: str, values: Any, path: str | Path) -> ModelEntry:
    try:
        return ModelEntry.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part not in ("RelativeSlo", "float"))
        message = first["msg"].removeprefix("Value error, ")
        raise VlmoptError(f"{path}: {name}{f', {place}' if place else ''}: {message}; put it right") from error
