"""OptimizeConfig and the environment switches."""

import pytest
from pydantic import ValidationError

from vlmopt import OptimizeConfig, VlmoptError
from vlmopt.config import PRESETS, Settings, settings


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    config = OptimizeConfig.preset(name, strict=False)
    assert OptimizeConfig.model_validate_json(config.model_dump_json()) == config
    assert config.name == name


def test_a_named_kernel_list_survives_json():
    config = OptimizeConfig(kernels=("swiglu", "linear"))
    assert OptimizeConfig.model_validate_json(config.model_dump_json()) == config


def test_configs_are_frozen():
    with pytest.raises(ValidationError):
        OptimizeConfig().vision = True


def test_unknown_names_raise_with_the_nearest_match():
    with pytest.raises(VlmoptError, match=r"unknown preset 'fst'; did you mean 'fast'"):
        OptimizeConfig.preset("fst")
    with pytest.raises(VlmoptError, match=r"unknown option 'visoin'; did you mean 'vision'"):
        OptimizeConfig.preset("exact", visoin=False)


def test_a_value_of_the_wrong_type_is_named():
    with pytest.raises(VlmoptError, match="bad option 'vision'"):
        OptimizeConfig.make(vision="perhaps")


def test_environment_switches(monkeypatch):
    monkeypatch.setenv("VLMOPT_PRESET", "exact")
    monkeypatch.setenv("VLMOPT_STRICT", "1")
    assert (Settings().preset, Settings().strict) == ("exact", True)


@pytest.mark.parametrize("name", ["VLMOPT_STRICT", "AICAS_CPP_RUNTIME_FORCE_REBUILD"])
def test_a_bad_environment_switch_is_one_sentence(monkeypatch, name):
    monkeypatch.setenv(name, "perhaps")
    settings.cache_clear()
    try:
        with pytest.raises(VlmoptError, match=f"switch {name}: "):
            settings()
    finally:
        settings.cache_clear()
