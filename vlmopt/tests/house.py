"""The rules of the house, each a function from a file to its faults; test_house.py applies them to every file."""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

MAX_LINES = 400
MAX_TRACKED_BYTES = 30 * 10**6

# What each part of the package may import from the package. Imports point one way: down this table's right-hand sides.
# "vlmopt" is the public API (`import vlmopt`); a part may always import itself.
_CORE = {"errors", "files", "config", "capabilities", "kernels", "ops", "weights", "stages", "cpp_runtime", "runtime"}
_CORE |= {"quant"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "config": {"errors"},
    "capabilities": {"errors"},
    "kernels": {"errors", "capabilities"},
    "ops": {"errors", "capabilities", "config", "kernels"},
    "weights": {"errors"},
    "stages": {"errors", "ops", "weights"},
    "quant": {"errors", "files", "kernels", "ops", "weights"},
    "cpp_runtime": {"errors", "config", "kernels", "weights", "stages"},
    "runtime": {"errors", "capabilities", "config", "ops", "weights", "stages", "cpp_runtime"},
    "optimize": _CORE,
    "vlmopt": {"errors", "config", "optimize"},
    "serving": {"errors", "files", "config", "bench"},
    "fetch": {"errors", "files", "config"},
    "bench": _CORE | {"optimize", "vlmopt"},
    "processor": {"errors", "kernels"},
    "workbook": _CORE | {"processor", "optimize", "vlmopt", "bench", "serving"},
    "first_run": _CORE | {"optimize", "vlmopt", "bench", "workbook", "fetch"},
}
# The one command line inside the package that starts the judged door; everything else is started by it.
DOOR = "first_run"
# Who may import transformers: the two modules that know its attribute names, and the layers that use its public doors.
TRANSFORMERS_USERS = ("weights", "processor", "runtime.stock", "bench", "workbook")

CODE_SUFFIXES = {".py", ".sh", ".cu", ".cuh", ".cpp", ".h", ".md", ".toml", ".yaml", ".yml"}
CODE_NAMES = {"Dockerfile", "run"}
GENERATED = {"REPORT.md"}  # as long as its records are many

PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}

# The brackets keep each pattern from finding itself here.
FOREIGN = {
    "a path of one machine": r"/[h]ome/\w|/[r]oot/|/[w]ork/|/[U]sers/\w|[C]:\\Users",
    "a package registry": r"[p]ypi\.org|[p]ythonhosted\.org|[r]egistry\.npmjs|--[e]xtra-index-url|/[o]pt/wheels",
    "a document that the repository does not hold": r"\b(?:[D]ESIGN|[P]ROTOCOL|[C]ASES|[A]NCHORS|[I]NTERFACES)\.md\b",
}


def tracked_files(root: Path) -> list[Path]:
    """Every file that git holds or would add (not ignored), sorted."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    paths = sorted({root / name for name in names.split("\0") if name})
    return [path for path in paths if path.is_file()]


def is_code(path: Path) -> bool:
    """Whether people write this file by hand, line by line."""
    return path.suffix in CODE_SUFFIXES or path.name in CODE_NAMES


def too_long(path: Path) -> list[str]:
    lines = len(path.read_text().splitlines())
    return [f"{path}: {lines} lines, at most {MAX_LINES}"] if lines > MAX_LINES else []


def too_heavy(paths: Iterable[Path], limit: int = MAX_TRACKED_BYTES) -> list[str]:
    sizes = sorted(((path.stat().st_size, path) for path in paths), reverse=True)
    total = sum(size for size, _ in sizes)
    if total < limit:
        return []
    largest = ", ".join(f"{path.name} {size}" for size, path in sizes[:5])
    return [f"{total} bytes are tracked, at most {limit}; the largest: {largest}"]


def foreign_text(path: Path) -> list[str]:
    """Machine paths, registry addresses and names of documents from elsewhere; binary files have none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match[0]}"
        for what, pattern in FOREIGN.items()
        for match in re.finditer(pattern, text)
    ]


def environment_reads(path: Path) -> list[str]:
    """Places where a Python file touches the process's environment variables."""
    faults = []
    for node in ast.walk(ast.parse(path.read_text())):
        by_attribute = isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"}
        by_name = isinstance(node, ast.ImportFrom) and node.module == "os" and {"environ", "getenv"} & _names(node)
        if by_attribute or by_name:
            faults.append(f"{path}:{node.lineno}: environment variables are read in vlmopt/config.py only")
    return faults


def pickle_faults(path: Path) -> list[str]:
    """Places where a Python file could run code out of a data file: tensors come from safetensors, or weights alone."""
    faults = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] in PICKLERS for name in names):
            faults.append(f"{path}:{node.lineno}: {names[0]} runs what it reads; keep data as JSON or safetensors")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            whole = ast.unparse(node.func.value) == "torch" and given.get("weights_only") is not True
            if whole or given.get("allow_pickle"):
                faults.append(f"{path}:{node.lineno}: load weights only, since a pickle runs what it holds")
    return faults


def import_faults(path: Path, package: Path) -> list[str]:
    """Imports of the file at `path`, inside the package folder `package`, that `LAYERS` does not allow."""
    module = _module(path, package)
    layer = _layer(module)
    if layer not in LAYERS:
        return [f"{path}: the part {layer!r} of the package stands in no layer; add it to LAYERS"]
    faults = []
    for line, name in _imports(path, package):
        top = name.split(".")[0]
        if top == "transformers" and not _is_under(module, TRANSFORMERS_USERS):
            faults.append(f"{path}:{line}: {module} imports transformers")
        if top in {"notebooks", "benchmark", "evaluation_wrapper"} and layer != DOOR:
            faults.append(f"{path}:{line}: {module} imports {top}, which imports the package")
        if top == "vlmopt" and _layer(name) not in LAYERS[layer] | {layer}:
            faults.append(f"{path}:{line}: {module} imports {name}, a layer that it must not know")
    return faults


def _imports(path: Path, package: Path) -> list[tuple[int, str]]:
    """Line and full name of everything that the file imports, also inside functions and through import_module."""
    found = []
    parent = ".".join(path.relative_to(package.parent).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), parent)
            found += [(node.lineno, _target(base, name, package)) for name in sorted(_names(node))]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in {"import_module", "__import__"}:
                found.append((node.lineno, str(node.args[0].value)))
    return found


def _target(base: str, name: str, package: Path) -> str:
    """`from base import name` brings in the module base.name where there is one, else the module base."""
    place = package.parent.joinpath(*base.split("."), name)
    return f"{base}.{name}" if place.is_dir() or place.with_suffix(".py").is_file() else base


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _layer(module: str) -> str:
    return [*module.split("."), "vlmopt"][1]


def _is_under(module: str, parts: Iterable[str]) -> bool:
    inside = module.removeprefix("vlmopt.") + "."
    return any(inside.startswith(part + ".") for part in parts)


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}
