"""What to optimise (`OptimizeConfig`) and every environment switch of the project (`Settings`)."""

import difflib
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vlmopt.errors import VlmoptError

PRESETS: dict[str, dict[str, Any]] = {
    "stock": {},
    "exact": {"vision": True, "connector": True, "text": True},
    "fast": {
        "vision": True,
        "connector": True,
        "text": True,
        "packed": True,
        "batches": True,
        "kernels": "all",
        "decode_graph": True,
        "cpp_runtime": True,
        "preprocessing": True,
    },
}
PRESETS["fast8"] = {**PRESETS["fast"], "weights": "int8", "head8": True}
PRESETS["fast4"] = {**PRESETS["fast"], "weights": "int4", "head8": True}


class OptimizeConfig(BaseModel):
    """Which parts of the model are served by `vlmopt`; immutable, and equal after a round trip through JSON.

    Every switch can be turned off alone, which is an ablation. `text` carries the others: without it every call goes to
    stock, since only the text stages know the static cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "custom"
    vision: bool = Field(False, description="vision tower by our stage instead of the stock module")
    connector: bool = Field(False, description="embedding merge and mRoPE positions by our stage")
    text: bool = Field(False, description="prefill and decode by our stages over one static KV cache")
    packed: bool = Field(False, description="q/k/v and gate/up as one product each; parameters become views")
    kernels: Literal["none", "all"] | tuple[str, ...] = Field("none", description="ops entries served by a kernel")
    batches: bool = Field(False, description="2 to 8 prompts in one call, each over its own part of the cache")
    decode_graph: bool = Field(False, description="one captured CUDA graph a decode step")
    speculate: Literal["none", "lookup", "eagle"] = Field("none", description="who drafts tokens that a step verifies")
    draft_head: Path | None = Field(None, description="folder of the EAGLE-3 head that drafts where `eagle` is to")
    weights: Literal["none", "int8", "fp8", "int4"] = Field("none", description="quantised copies that decode reads")
    head8: bool = Field(False, description="greedy choices from an int8 copy of the head, the same choices")
    keep_originals: bool = Field(True, description="False frees the weights that copies stand for; no way back")
    kv_cache_dtype: Literal["auto", "fp8"] = Field("auto", description="fp8 holds keys and values in e4m3")
    cpp_runtime: bool = Field(False, description="the layer loops of vision and prefill driven from C++")
    prompt_graphs: bool = Field(False, description="vision and prefill padded to buckets, one CUDA graph each")
    preprocessing: bool = Field(False, description="still images prepared on the device by `processor.on_device`")
    strict: bool = Field(True, description="raise for a part that cannot run, instead of recording the skip")

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"unknown option {key!r}{_nearest(key, cls.model_fields)}")
        return values

    @model_validator(mode="after")
    def _one_driver(self) -> "OptimizeConfig":
        if self.cpp_runtime and self.prompt_graphs:
            raise ValueError("cpp_runtime and prompt_graphs both drive vision and prefill; switch one of them off")
        return self

    @model_validator(mode="after")
    def _cache(self) -> "OptimizeConfig":
        if self.prompt_graphs and self.has_fp8_cache:
            raise ValueError(
                "prompt_graphs fill no cache of eight bits; switch it off, or leave kv_cache_dtype at 'auto'"
            )
        return self

    @model_validator(mode="after")
    def _originals(self) -> "OptimizeConfig":
        if not self.keep_originals and self.weights == "none":
            raise ValueError("keep_originals=False frees what copies stand for; say by weights which copies to make")
        if not self.keep_originals and self.cpp_runtime:
            raise ValueError("cpp_runtime reads the weights that keep_originals=False frees; switch one of them off")
        return self

    @model_validator(mode="after")
    def _some_head(self) -> "OptimizeConfig":
        if self.speculate == "eagle" and self.draft_head is None:
            raise ValueError("speculate='eagle' needs draft_head, the folder of a head")
        return self

    @property
    def has_copies(self) -> bool:
        """Whether decode steps read quantised copies."""
        return self.weights != "none" or self.head8

    @property
    def has_fp8_cache(self) -> bool:
        """Whether keys and values are held in e4m3."""
        return self.kv_cache_dtype == "fp8"

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "OptimizeConfig":
        """The preset `name` with `changes` on top.

        Raises:
            VlmoptError: an unknown preset or option; the message names the nearest one.
        """
        if name not in PRESETS:
            raise VlmoptError(f"unknown preset {name!r}{_nearest(name, PRESETS)}; presets are {', '.join(PRESETS)}")
        return cls.make(**{"name": name, **PRESETS[name], **changes})

    @classmethod
    def make(cls, **values: Any) -> "OptimizeConfig":
        """`OptimizeConfig(**values)` with a `VlmoptError` of one sentence for a bad option."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"][:1])
            message = first["msg"].removeprefix("Value error, ")
            raise VlmoptError(f"bad option{f' {place!r}' if place else ''}: {message}") from error


def as_config(config: "str | OptimizeConfig") -> OptimizeConfig:
    """A preset's name or a config, as a config."""
    return config if isinstance(config, OptimizeConfig) else OptimizeConfig.preset(config)


def _nearest(word: str, known: Any) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


class Settings(BaseSettings):
    """Environment switches: all but two inherited names have the prefix `VLMOPT_` (such as `VLMOPT_PRESET=exact`)."""

    model_config = SettingsConfigDict(env_prefix="VLMOPT_", extra="ignore")

    preset: str = Field("fast", description="preset that evaluation_wrapper.py applies")
    strict: bool = Field(False, description="evaluation_wrapper.py raises where a part cannot run")
    git_commit: str | None = Field(None, description="commit to write into records on a host without git")
    git_dirty: bool | None = Field(None, description="whether that commit had uncommitted changes")
    model_dir: Path = Field(Path("Qwen3-VL-2B-Instruct"), description="where the real weights lie")
    data_dir: Path = Field(Path("data-textvqa"), description="where TextVQA in the contest's format lies")
    visible_gpus: str | None = Field(
        None,
        validation_alias="CUDA_VISIBLE_DEVICES",
        description="as CUDA reads it: serving watches the memory of these GPUs alone",
    )
    cpp_runtime_force_rebuild: bool = Field(
        False,
        validation_alias="AICAS_CPP_RUNTIME_FORCE_REBUILD",
        description="the C++ runtime is compiled anew though a fitting library exists",
    )


@cache
def settings() -> Settings:
    """The process's settings, read from the environment once.

    Raises:
        VlmoptError: a switch has a value of the wrong type.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])  # an inherited name is given as it stands in the environment
        name = field if field.isupper() else f"VLMOPT_{field.upper()}"
        raise VlmoptError(f"environment switch {name}: {first['msg']}") from error
