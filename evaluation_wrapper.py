"""The judged door: loads the model, applies `vlmopt` to it, and exposes processor, model and device."""

import logging
from typing import Any

import torch

import vlmopt
from vlmopt.bench.models import load, prompt
from vlmopt.config import settings
from vlmopt.errors import PartFailed, VlmoptError

logger = logging.getLogger("vlmopt")


class VLMModel:
    """Qwen3-VL with every optimisation of the chosen preset (`VLMOPT_PRESET`, by default "fast").

    The checkpoint's own dtype is kept. On a machine without CUDA it runs on the CPU by itself. `plan` and `status` say
    what is active, `enabled` which of the methods below switched something on.
    """

    def __init__(self, model_path: str, device: str = "cuda:0", preset: str | None = None):
        loaded = load(model_path, device)
        self._model, self._processor, self._device = loaded.model, loaded.processor, loaded.device
        self._preset = vlmopt.OptimizeConfig.preset(preset or settings().preset, strict=settings().strict)
        self._config = vlmopt.OptimizeConfig(name=self._preset.name, strict=self._preset.strict)
        self.enabled: list[str] = []
        self.plan: vlmopt.Plan | None = None  # none where all calls are left to stock
        try:
            parts = vlmopt.plan(self._model, self._preset).parts
        except VlmoptError as refused:
            if self._preset.strict:
                raise
            logger.warning("every call is left to stock: %s", refused)
            return
        self._runs = {part.name for part in parts if part.state == "on"}

        self._explore_model_structure()
        self._optimize_vision_encoder()
        self._optimize_kv_cache()
        self._optimize_cross_modal_connector()
        self._enable_flash_attention()
        self._apply_quantization()
        self._optimize_preprocessing()

        self.plan = vlmopt.plan(self._model, self._config)
        vlmopt.optimize(self._model, self._config)
        logger.info("%s", self.plan)

    @property
    def model(self) -> Any:
        """The transformers model, whose `generate` a harness calls."""
        return self._model

    @property
    def processor(self) -> Any:
        """The model's processor."""
        return self._processor

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self._device

    @property
    def status(self) -> vlmopt.Status:
        """What is active and who served the calls."""
        return vlmopt.status(self._model)

    def generate(self, image: Any, question: str, max_new_tokens: int = 128) -> str:
        """Answer one question about one image, for trying things out."""
        inputs = prompt(self._processor, image, question).to(self._device)
        ids = self._model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return self._processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def _explore_model_structure(self) -> None:
        """Log what there is to optimise; notebook 10 shows it in full."""
        text, vision = self._model.config.text_config, self._model.config.vision_config
        size = sum(parameter.numel() for parameter in self._model.parameters()) / 1e6
        logger.info("%.1f M parameters, %d text layers, %d vision blocks", size, text.num_hidden_layers, vision.depth)

    def _optimize_vision_encoder(self) -> None:
        self._enable("vision encoder", "vision", "cpp_runtime")

    def _optimize_kv_cache(self) -> None:
        self._enable("KV cache", "text", "packed", "batches", "decode_graph", "speculate")

    def _optimize_cross_modal_connector(self) -> None:
        self._enable("cross-modal connector", "connector")

    def _enable_flash_attention(self) -> None:
        """Kernels of ours, attention over images, prompts and the live cache among them."""
        self._enable("flash attention", "kernels")

    def _apply_quantization(self) -> None:
        self._enable("quantization", "weights", "head8")

    def _optimize_preprocessing(self) -> None:
        """Still images on the model's device; where that fails, and unless strict, the processor stays stock's."""
        if "preprocessing" in self._runs:
            from vlmopt.processor import on_device

            try:
                self._processor = on_device(self._processor, self._device)
            except PartFailed as failed:
                if self._preset.strict:
                    raise
                logger.warning("preprocessing is left to stock: %s", failed)
                return
        self._enable("preprocessing", "preprocessing")

    def _enable(self, name: str, *switches: str) -> None:
        """Take over the preset's value of these switches; record `name` if that turns anything on here."""
        values = {switch: getattr(self._preset, switch) for switch in switches}
        self._config = self._config.model_copy(update=values)
        if self._runs.intersection(switches):
            self.enabled.append(name)
        else:
            logger.info("%s: nothing to switch on here under preset %r", name, self._preset.name)
