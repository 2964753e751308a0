"""The direction of imports, read from the source: lazy imports count, imports for type checking do not."""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WINGS = ("errors", "quantities", "tables", "measuring", "solving", "runtime", "experiments", "report", "cli")
FILES = sorted((ROOT / "hilore_cli").rglob("*.py"))
RUNTIME_LINES = 500
CHOICE_LINES = 200
CLOSURE_LINES = 1050


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All of a module but what only the type checker reads."""
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield other
                yield from nodes(other)
        else:
            yield child
            yield from nodes(child)


def imports(module: str) -> set[str]:
    found: set[str] = set()
    for node in nodes(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            found.add(node.module)
            found.update(inner for alias in node.names if (inner := f"{node.module}.{alias.name}") in MODULES)
    return found


def wing(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "hilore_cli" else ""


def outside(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(module)} - set(sys.stdlib_module_names) - {"hilore_cli"}


def closure(start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += [name for name in imports(module) if name in MODULES]
    return reached


def code_lines(path: Path) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    source = path.read_text()
    lines: set[int] = set()
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


@pytest.mark.parametrize("module", [name for name in MODULES if wing(name) in WINGS])
def test_no_module_imports_a_higher_wing(module: str) -> None:
    rank = WINGS.index(wing(module))
    higher = {name for name in imports(module) if wing(name) in WINGS and WINGS.index(wing(name)) > rank}
    assert not higher


def test_every_module_belongs_to_a_wing() -> None:
    assert {wing(name) for name in MODULES} <= {"", "__main__", *WINGS}


def test_the_root_package_imports_nothing_of_ours_at_once() -> None:
    assert not {name for name in imports("hilore_cli") if name.startswith("hilore_cli")}


@pytest.mark.parametrize("module", [name for name in MODULES if wing(name) == "solving"])
def test_solving_never_imports_torch_or_what_measures(module: str) -> None:
    assert not {name for name in imports(module) if wing(name) == "measuring"}
    assert "torch" not in {name for reached in closure(module) for name in outside(reached)}


@pytest.mark.parametrize("module", [name for name in MODULES if wing(name) in ("measuring", "runtime")])
def test_measuring_and_the_runtime_never_import_the_solver_or_pandas(module: str) -> None:
    allowed = {"pandas"} if module == "hilore_cli.measuring.rollouts" else set()
    assert not outside(module) & {"pulp", "highspy", "pandas"} - allowed


@pytest.mark.parametrize("module", list(MODULES))
def test_only_the_report_and_the_command_line_import_rich_and_typer(module: str) -> None:
    allowed = {"report": {"rich"}, "cli": {"rich", "typer"}}.get(wing(module), set())
    assert outside(module) & {"rich", "typer", "click"} <= allowed


@pytest.mark.parametrize("module", [name for name in MODULES if wing(name) not in ("cli", "__main__")])
def test_only_the_command_line_prints_or_exits(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {
                "print",
                "exit",
                "sys.exit",
                "os._exit",
                "sys.stdout.write",
                "sys.stderr.write",
            }
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert not ast.unparse(node.exc).startswith(("SystemExit", "typer.Exit"))


def test_the_loader_needs_torch_and_pyarrow_alone() -> None:
    assert {name for module in closure("hilore_cli.runtime.loader") for name in outside(module)} <= {"torch", "pyarrow"}


def test_what_runs_in_training_stays_small() -> None:
    """Loader, replay, op stream and identity; the choice of rungs, and what other wings share, are counted apart."""
    shared = ("hilore_cli.measuring.codecs", "hilore_cli.tables.", "hilore_cli.errors")
    choice = ("hilore_cli.runtime.choice", "hilore_cli.runtime.budget")
    lines = {module: code_lines(MODULES[module]) for module in sorted(closure("hilore_cli.runtime.loader"))}
    assert sum(lines.values()) < CLOSURE_LINES, lines
    assert sum(lines[module] for module in choice) < CHOICE_LINES, lines
    core = (count for module, count in lines.items() if not module.startswith((*shared, *choice)))
    assert sum(core) < RUNTIME_LINES, lines
