"""The walls of the house, executable: who may import what, how large things get, and what must not exist."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAB = "eval/lab/"
FOLDERS = {"sglang_sparse", "kernels", "launch", "eval", "tests", "patches"}
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
)
FILES = [ROOT / name for name in TRACKED.stdout.split("\n") if name and (ROOT / name).is_file()]
if TRACKED.returncode != 0:
    pytest.skip("not a git checkout", allow_module_level=True)
SOURCES = [path for path in FILES if path.suffix == ".py"]
# The rooms of `sglang_sparse`, and those whose names a file in each may import, types included.
ROOMS = {
    "methods": {"methods"},
    "config": {"config", "methods"},
    "attention": {"attention", "config", "methods"},
    "scheduler": {"attention", "config", "methods", "scheduler"},
    "debug": {"attention", "config", "debug", "methods", "scheduler"},
    "hooks": {"attention", "config", "hooks", "methods", "scheduler"},
    "tools": {"attention", "config", "hooks", "methods", "scheduler", "tools"},
}
COMMANDS = {"calibrate.py", "check.py", "frontend.py", "plugin.py", "serve.py", "tune.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Top-level names of all absolute imports, but for those that only type checkers see."""
    tree = ast.parse(path.read_text())
    skipped = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    names = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_top_level_folders_are_the_fixed_ones() -> None:
    folders = {relative(path).split("/")[0] for path in FILES if "/" in relative(path)}
    assert {folder for folder in folders if not folder.startswith(".")} == FOLDERS


def test_no_package_named_kernels_or_tests() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "would shadow Hugging Face's kernels package"
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_kernels_import_only_torch_and_triton() -> None:
    allowed = {"torch", "triton", "sglang_sparse_kernels", *sys.stdlib_module_names}
    for path in SOURCES:
        if relative(path).startswith("kernels/"):
            # The compiler that comes with torch, for kernels in CUDA C++.
            compiler = {"cuda"} if path.name == "nvrtc.py" else set()
            assert imported(path) <= allowed | compiler, relative(path)


def test_triton_kernels_call_no_functions_of_triton_itself() -> None:
    """SGLang replaces one of them (``triton.next_power_of_2``) by a function that no kernel may call."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "kernels").rglob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id == "triton"
    ]
    assert not found


def everything_imported(path: Path) -> set[str]:
    """Dotted names of all that a file imports: for type checkers too, inside functions, and relative ones resolved."""
    package = relative(path).removesuffix(".py").split("/")[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


PRODUCT = [path for path in SOURCES if relative(path).startswith("sglang_sparse/")]


def test_the_package_has_these_rooms_and_commands() -> None:
    places = [relative(path).split("/")[1:] for path in PRODUCT]
    assert {place[0] for place in places if len(place) > 1} == set(ROOMS)
    assert {place[0] for place in places if len(place) == 1} == {*COMMANDS, "__init__.py", "errors.py"}


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    _, room, *_ = relative(path).split("/")
    allowed = set() if room in {"frontend.py", "errors.py", "__init__.py"} else ROOMS.get(room, set(ROOMS))
    own = {name.split(".")[1] for name in everything_imported(path) if name.split(".")[0] == "sglang_sparse"}
    assert own - {"__version__", "errors"} <= allowed


def test_no_file_is_a_splinter() -> None:
    entries = {*COMMANDS, "__init__.py"}
    assert not [relative(path) for path in PRODUCT if path.name not in entries and path.read_text().count("\n") < 40]


def test_sglang_is_imported_by_the_rooms_beside_it_alone() -> None:
    """Methods never import it, nor for types; what reads its arguments, and commands, only once it is asked."""
    for path in PRODUCT:
        _, room, *_ = relative(path).split("/")
        if room == "methods":
            assert "sglang" not in {name.split(".")[0] for name in everything_imported(path)}, relative(path)
        if room in {"config", *COMMANDS}:
            top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
            assert not [node for node in top if (node.module or "").startswith("sglang.")], relative(path)


def imported_modules(path: Path) -> set[str]:
    """Full names of what a file imports absolutely, also for type checkers; of ``from a import b`` also ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


USER_ROOM = [path for path in SOURCES if relative(path).startswith("eval/") and not relative(path).startswith(LAB)]


def test_user_commands_import_neither_the_lab_nor_the_plugin() -> None:
    for path in USER_ROOM:
        tops = {".".join(name.split(".")[:2]) for name in imported_modules(path)}
        assert not imported(path) & {"sglang", "sglang_sparse", "sglang_sparse_kernels"}, relative(path)
        assert "eval.lab" not in tops, relative(path)


def test_user_commands_run_in_a_checkout_without_the_lab(tmp_path: Path) -> None:
    for path in FILES:
        name = relative(path)
        if name.startswith(("eval/", "launch/")) and not name.startswith((LAB, "eval/models/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / name)
    commands = [path.stem for path in USER_ROOM if path.parent == ROOT / "eval"]
    # `eval` is a namespace package: another checkout on the path would lend its lab.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    lines = [f"import eval.{command}" for command in commands]
    lines += ["import importlib.util", "assert importlib.util.find_spec('eval.lab') is None"]
    for command in (["-c", "\n".join(lines)], ["-m", "eval.compare", "--help"]):
        ran = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


def test_product_tests_need_neither_the_lab_nor_its_results() -> None:
    for path in SOURCES:
        name = relative(path)
        if name.startswith("tests/") and not name.startswith("tests/lab/") and path != Path(__file__):
            found = re.search(r"eval[./]lab|eval import lab|\"lab\" /|\"results\"", path.read_text())
            assert not found, f"{name}: {found}"


def test_eval_and_launch_talk_to_servers_over_http() -> None:
    for path in SOURCES:
        name = relative(path)
        plugins = ("launch/cpu_platform/", "eval/lab/servers/host_times/")
        plugins += tuple(f"eval/lab/{folder}/server/" for folder in ("agreement", "structured"))
        if name.startswith(("eval/", "launch/")) and not name.startswith(plugins):
            assert "sglang" not in imported(path), name
            # They judge selections in process, are methods themselves, or ask a method which layers it would serve.
            if not name.startswith(("eval/lab/selection/", "eval/lab/controls/", "eval/lab/tables/cards.py")):
                assert "sglang_sparse" not in imported(path), name


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= (500 if relative(path).startswith("kernels/") else 400)
    # Triton kernels are one function by nature.
    limit = 100 if relative(path).startswith("kernels/") else 50
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            documentation = ast.get_docstring(node, clean=False)
            lines = node.end_lineno - node.lineno + 1 - (documentation.count("\n") + 1 if documentation else 0)
            assert lines <= limit, f"{node.name} has {lines} lines"


# Lines of the product with a type that nobody checks.
MOST_ANY = 84
# Where others' code runs, which may raise anything.
BORDERS = (
    "sglang_sparse/check.py",
    "sglang_sparse/methods/registry.py",
    "sglang_sparse/tools/calibration/capture.py",
)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_net_too_wide(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except at line {node.lineno}"
            wide = isinstance(node.type, ast.Name) and node.type.id == "Exception"
            assert not wide or relative(path) in BORDERS, f"line {node.lineno}"


def test_no_call_of_the_product_takes_several_unpacked_tuples() -> None:
    """Neither a reader nor a type checker can match what is in them to parameters."""
    calls = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "sglang_sparse")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and sum(isinstance(value, ast.Starred) for value in node.args) > 1
    ]
    assert calls == []


def test_few_types_are_any() -> None:
    found = [
        f"{relative(path)}:{number}"
        for path in PRODUCT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bAny\b", line) and "import" not in line
    ]
    assert len(found) <= MOST_ANY, found


def test_one_environment_variable() -> None:
    found = set()
    for path in SOURCES:
        if relative(path).startswith(("sglang_sparse/", "kernels/")):
            found |= set(re.findall(r"SGLANG_SPARSE_[A-Z_]+", path.read_text()))
    assert found <= {"SGLANG_SPARSE_REFERENCE"}


def test_no_addresses_in_dependency_files() -> None:
    for name in ("pyproject.toml", "constraints.txt", "launch/cpu_platform/pyproject.toml"):
        assert not re.search(r"https?://", (ROOT / name).read_text()), name
    assert not any(path.name == "uv.lock" for path in FILES)
