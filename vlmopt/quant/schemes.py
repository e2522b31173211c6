"""How a weight is quantised, as data with a JSON form."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from vlmopt.errors import VlmoptError
from vlmopt.kernels.gemv_q4 import GROUP


@dataclass(frozen=True)
class Scheme:
    """A weight-only scheme; activations stay in the model's dtype."""

    name: str
    values: Literal["int8", "fp8", "int4"]
    """int8 and fp8 (e4m3): a byte a value; int4: two to a byte."""
    group: int = 0
    """Values of a row that share one scale; 0 for the whole row, which is one output channel."""
    zero_point: bool = False
    """Whether a group also has the whole number that stands for zero; symmetric else."""

    def to_dict(self) -> dict[str, Any]:
        """The scheme as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Scheme":
        """The scheme that `to_dict` gave.

        Raises:
            VlmoptError: other keys, or a combination that no kernel serves.
        """
        try:
            scheme = cls(**data)
        except TypeError as error:
            raise VlmoptError(f"not a quantisation scheme ({error}); give what Scheme.to_dict wrote") from error
        if (scheme.values, scheme.group, scheme.zero_point) not in _SERVED:
            raise VlmoptError(
                f"no kernel serves {scheme.values} in groups of {scheme.group or 'a row'}"
                f"{' with a zero point' if scheme.zero_point else ''}; schemes are {', '.join(SCHEMES)}"
            )
        return scheme

    def bytes(self, out: int, n_in: int, itemsize: int) -> int:
        """Bytes of the copy of a weight [out, in] whose own values have `itemsize` bytes."""
        if self.values != "int4":
            return out * (n_in + 4)
        return out * (n_in // 2 + n_in // self.group * (itemsize + 1))


_SERVED = (("int8", 0, False), ("fp8", 0, False), ("int4", GROUP, True), ("int4", GROUP, False))
SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "int8": Scheme("int8", "int8"),
        "fp8": Scheme("fp8", "fp8"),
        "int4": Scheme("int4", "int4", GROUP, zero_point=True),
    }
)
"""What `OptimizeConfig.weights` names."""
