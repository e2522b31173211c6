"""The guard that notices when the model is no longer what the stages were made from."""

from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter

from torch import Tensor, nn

from vlmopt.weights import attention_implementations


class Guard:
    """Remembers what the stages rely on; `reason` names the first thing that changed since.

    The stages do not call the stock modules, so a hook, an adapter, a replaced module, class or parameter would be
    ignored without this look. Host work only, and it stands before a call's first launch. With `copied`, weights were
    copied, or scales made of them, so that an edit in place counts too.
    """

    def __init__(self, model: nn.Module, copied: bool = False):
        self._versions = [(name, p, _version(p)) for name, p in model.named_parameters()] if copied else []
        # a reference to the root would keep it alive
        named = [(name, module) for name, module in model.named_modules() if module is not model]
        self._modules = [(name, module, type(module), *_contents(module)) for name, module in named]
        self._root = (type(model), *_contents(model))
        self._forwards = {type(module): type(module).forward for module in model.modules()}
        self._attention = attention_implementations(model)
        self._snapshot = Snapshot([module for _, module in named], [p for _, p, _ in self._versions])

    def reason(self, model: nn.Module) -> str | None:
        """What changed, as words for `status`, or None."""
        hooks = nn.modules.module
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return "a global forward hook is registered"
        if attention_implementations(model) != self._attention:
            return "the attention implementation was changed"
        if model.training:
            return "the model is in training mode"
        for cls, forward in self._forwards.items():
            if cls.forward is not forward:
                return f"{cls.__name__}.forward was replaced"
        if not self._snapshot.holds() and (found := self._walk()):
            return found
        return _changed("model", model, *self._root)

    def _walk(self) -> str | None:
        """What `Snapshot.holds` looks at, one module after the other, so that the first change can be named."""
        for name, module, *expected in self._modules:
            if found := _changed(name, module, *expected):
                return found
        for name, parameter, version in self._versions:
            if _version(parameter) != version:
                return f"{name} was edited after copies or scales were made of the weights"
        return None


class Snapshot:
    """The state of modules in flat lists, which a few passes without a line of Python for each module compare.

    That takes less than half as long as walking over the modules. `copied` are tensors whose edits count too.
    """

    def __init__(self, modules: list[nn.Module], copied: list[Tensor]):
        self._modules = modules
        self._types = list(map(type, modules))
        self._states = list(map(_STATE, modules))
        self._parents = list(filter(_CHILDREN, self._states))
        self._children = list(map(tuple, map(dict.values, map(_CHILDREN, self._parents))))
        # most modules have no children, many no parameters, nearly all no buffers: there it is enough that it stays so
        self._childless, self._bare, self._unbuffered = (
            [state for state in self._states if not of(state)] for of in (_CHILDREN, _PARAMETERS, _BUFFERS)
        )
        owners = [(state, name) for name in ("_parameters", "_buffers") for state in self._states if state[name]]
        self._owners, self._owned = ([owner[i] for owner in owners] for i in range(2))
        self._tables = [state[name] for state, name in owners]
        self._sizes = list(map(len, self._tables))
        self._holders = [table for table in self._tables for _ in table]
        self._keys = list(chain.from_iterable(self._tables))
        self._tensors = list(chain.from_iterable(map(dict.values, self._tables)))
        self._parameters = [p for state in self._states for p in state["_parameters"].values() if p is not None]
        self._pointers = list(map(Tensor.data_ptr, self._parameters))
        buffers = [b for state in self._states for b in state["_buffers"].values() if b is not None]
        self._counted = [tensor for tensor in (*buffers, *copied) if not tensor.is_inference()]
        self._versions = list(map(_VERSION, self._counted))

    def holds(self) -> bool:
        """Whether all is as it was. False may be a false alarm, such as a table that was replaced by its equal."""
        hooks = filter(None, map(_HOOKS, self._states))
        return (
            list(map(type, self._modules)) == self._types
            and all(map(is_, map(_STATE, self._modules), self._states))
            and not any(map(contains, self._states, repeat("forward")))
            and not any(map(_PRE_HOOKS, self._states))
            and not any(map(_may_act, chain.from_iterable(map(dict.values, hooks))))
            and list(map(tuple, map(dict.values, map(_CHILDREN, self._parents)))) == self._children
            and not any(map(_CHILDREN, self._childless))
            and not any(map(_PARAMETERS, self._bare))
            and not any(map(_BUFFERS, self._unbuffered))
            and all(map(is_, map(dict.get, self._owners, self._owned), self._tables))
            and list(map(len, self._tables)) == self._sizes
            and all(map(is_, map(dict.get, self._holders, self._keys), self._tensors))
            and list(map(Tensor.data_ptr, self._parameters)) == self._pointers
            and list(map(_VERSION, self._counted)) == self._versions
        )


_STATE, _VERSION = attrgetter("__dict__"), attrgetter("_version")
_HOOKS, _PRE_HOOKS = itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks")
_CHILDREN, _PARAMETERS, _BUFFERS = itemgetter("_modules"), itemgetter("_parameters"), itemgetter("_buffers")


def _contents(module: nn.Module) -> tuple:
    parameters = [(name, p, None if p is None else p.data_ptr()) for name, p in module._parameters.items()]
    # buffers feed derived tables (cos, sin), so their in-place edits count too
    buffers = [(name, b, _version(b)) for name, b in module._buffers.items()]
    return tuple(module._modules.values()), parameters, buffers


def _changed(name: str, module: nn.Module, cls: type, children: tuple, parameters: list, buffers: list) -> str | None:
    if type(module) is not cls:
        return f"{name} is now a {type(module).__name__}"
    state = module.__dict__
    if "forward" in state:
        return f"{name}.forward was replaced"
    hooks = state["_forward_hooks"]
    if state["_forward_pre_hooks"] or (hooks and any(map(_may_act, hooks.values()))):
        return f"{name} has a forward hook"
    if tuple(state["_modules"].values()) != children:
        return f"{name} has other submodules"
    if len(state["_parameters"]) != len(parameters) or len(state["_buffers"]) != len(buffers):
        return f"{name} has other parameters or buffers"
    for key, parameter, pointer in parameters:
        current = state["_parameters"].get(key)
        if current is not parameter or (current is not None and current.data_ptr() != pointer):
            return f"{name}.{key} was replaced"
    for key, buffer, version in buffers:
        current = state["_buffers"].get(key)
        if current is not buffer or _version(current) != version:
            return f"{name}.{key} was replaced or edited"
    return None


def _may_act(hook: object) -> bool:
    """False for the hooks that stock leaves behind once it was asked for hidden states; they act on request alone."""
    return getattr(hook, "__module__", "") != "transformers.utils.output_capturing"


def _version(tensor: Tensor | None) -> int:
    """Count of in-place edits; inference tensors keep none and cannot be edited outside inference mode."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
