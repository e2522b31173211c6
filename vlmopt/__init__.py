"""vlmopt: makes one Qwen3-VL model instance answer fast without changing what it says.

report = vlmopt.optimize(model, "fast")
print(vlmopt.status(model).calls)
vlmopt.revert(model)
"""

from vlmopt.config import OptimizeConfig
from vlmopt.errors import VlmoptError

try:
    from vlmopt.optimize import Part, Plan, Status, optimize, optimized, plan, revert, status
except ModuleNotFoundError as missing:
    # an environment that only serves has no Triton; there `vlmopt.serving` is all that is used
    if missing.name not in ("triton", "transformers"):
        raise
    _MISSING = missing.name

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise VlmoptError(f"vlmopt.{name} needs {_MISSING}, which is not installed; see requirements.txt")
        raise AttributeError(f"module 'vlmopt' has no attribute {name!r}")


__all__ = [
    "OptimizeConfig",
    "Part",
    "Plan",
    "Status",
    "VlmoptError",
    "optimize",
    "optimized",
    "plan",
    "revert",
    "status",
]
