"""vlmopt: makes one Qwen3-VL model instance answer fast without changing what it says.

report = vlmopt.optimize(model, "fast")
print(vlmopt.status(model).calls)
vlmopt.revert(model)
"""

from vlmopt.config import OptimizeConfig
from vlmopt.errors import VlmoptError
from vlmopt.optimize import Part, Plan, Status, optimize, optimized, plan, revert, status

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
