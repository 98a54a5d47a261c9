"""What can be said of a harness from its text alone: is it one, and does it stay within its scope (Section 5.2)?

Syntax trees only; nothing here runs a candidate. These checks catch mistakes early and in words that a proposer can act
on. They keep nobody in: that is the work of the process that runs the harness.
"""

import ast
import hashlib
import re
import warnings
from collections.abc import Iterable
from functools import lru_cache

from harnesses.contract import IMPORTS

PROMPTS = ("SYSTEM_PROMPT", "USER_PROMPT")
MAX_BYTES = 200_000
FORBIDDEN = frozenset(("__import__", "importlib", "eval", "exec", "compile", "open", "globals", "locals", "vars",
                       "__builtins__", "__globals__", "__loader__", "__subclasses__"))  # fmt: skip


def tree_hash(source: str) -> str:
    """SHA-256 of the syntax tree, where comments, formatting and docstrings don't count. Raises SyntaxError."""
    return hashlib.sha256(_parse(source)[1].encode()).hexdigest()


@lru_cache
def name_of(source: str) -> str:
    """The name under which a run folder keeps a harness."""
    return tree_hash(source)[:12]


def problem(
    source: str, *, scope: str = "harness", h_0: str | None = None, exam_phrases: Iterable[str] = ()
) -> str | None:
    """Why this source can't be a candidate, in one line, or None.

    scope "prompts" (FST) asks for h_0's syntax tree with nothing but the two prompts changed. `exam_phrases`: ids,
    positions and question text of D_harness and D_test, which no candidate may quote. Never raises because of `source`;
    ValueError for an unknown scope.
    """
    if scope not in ("harness", "prompts") or (scope == "prompts" and h_0 is None):
        raise ValueError(f"expected scope 'harness', or 'prompts' with h_0; found {scope!r} and h_0={h_0!r:.20}")
    try:
        tree, _ = _parse(source)
    except SyntaxError as error:
        return f"does not parse: {error.msg}" + (f" (line {error.lineno})" if error.lineno else "")
    reason = _entry_problem(tree) or _prompt_problem(tree) or _reach_problem(tree)
    if not reason and scope == "prompts" and _frame(source) != _frame(h_0):
        reason = f"changes code: in this scope only the text of {' and '.join(PROMPTS)} may differ from h_0"
    return reason or _exam_problem(source, tree, exam_phrases)


def prompts(source: str) -> dict[str, str]:
    """The two prompt literals by name. Raises SyntaxError, and ValueError where they are not plain literals."""
    tree, _ = _parse(source)
    if reason := _prompt_problem(tree):
        raise ValueError(reason)
    return {name: _prompt_literal(tree, name).value for name in PROMPTS}


def with_prompts(source: str, **new: str) -> str:
    """The source with these prompt literals replaced and every other byte as it was. Raises as `prompts` does."""
    prompts(source)
    for name, text in new.items():
        if name not in PROMPTS:
            raise ValueError(f"expected {' or '.join(PROMPTS)}; found {name}")
        source = replace_span(source, _prompt_literal(ast.parse(source), name), literal(text))
    return source


def replace_span(source: str, node: ast.AST, new: str) -> str:
    """The source with the text of one node of its syntax tree replaced."""
    data = source.encode()  # ast counts columns in bytes
    lines = re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", data)  # its line ends, not those of str.splitlines
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (data[:start] + new.encode() + data[end:]).decode()


def literal(text: str) -> str:
    """A Python literal of this text, in triple quotes where it has several lines."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    readable = '"""' + escaped.replace('\\"', '"') + '"""' if "\n" in text else f'"{escaped}"'
    try:
        return readable if ast.literal_eval(readable) == text else repr(text)
    except (SyntaxError, ValueError):  # quotes at the end, lone surrogates, NUL
        return repr(text)


def _parse(source: str) -> tuple[ast.Module, str]:
    """The syntax tree without docstrings and its dump. Whatever is wrong with the source comes as SyntaxError."""
    try:
        size = len(source.encode())
        if size > MAX_BYTES:
            raise SyntaxError(f"{size} bytes of source, at most {MAX_BYTES} are read")
        if "\0" in source:
            raise SyntaxError("source has NUL bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
            compile(tree, "harness", "exec", dont_inherit=True)  # sees more than the parser: return outside a function
        if "__doc__" not in source:
            _drop_docstrings(tree)
        return tree, ast.dump(tree)
    except (RecursionError, MemoryError):
        raise SyntaxError("source is nested too deeply") from None
    except ValueError as error:  # lone surrogates, integers too long to print
        raise SyntaxError(str(error)) from None


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(node, clean=False) is not None:
                del node.body[0]


def _frame(source: str) -> str:
    """The dump of everything but the text of the two prompts."""
    return _parse(with_prompts(source, **dict.fromkeys(PROMPTS, "")))[1]


def _prompt_literal(tree: ast.Module, name: str) -> ast.Constant | None:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str())) if target == name:
                return node.value
    return None


def _bindings(tree: ast.Module, name: str) -> int:
    """How often anything in this file binds the name: assignment, import, def, global, pattern, except ... as."""
    count = 0
    for node in ast.walk(tree):
        is_use = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if not is_use and not isinstance(node, ast.Constant | ast.Attribute | ast.keyword):
            values = (value for _, value in ast.iter_fields(node))
            count += sum(value == name or (isinstance(value, list) and name in value) for value in values)
    return count


def _entry_problem(tree: ast.Module) -> str | None:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "harness"]
    if len(found) != 1 or _bindings(tree, "harness") != 1:
        return "expected one plain function `def harness(task)` at top level and no other use of that name"
    function, a = found[0], found[0].args
    if len(a.posonlyargs + a.args) != 1 or a.vararg or a.kwonlyargs or a.kwarg or function.decorator_list:
        return "harness must take exactly one argument, the task, and have no decorator"
    if not _yields(function):
        return "harness must be a generator: yield Ask(messages) for a reply, yield Act(action) for a result"
    return None


def _yields(function: ast.FunctionDef) -> bool:
    """Has it a yield of its own, not one of a function inside it?"""
    nodes = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            nodes.extend(ast.iter_child_nodes(node))
    return False


def _prompt_problem(tree: ast.Module) -> str | None:
    for name in PROMPTS:
        if _prompt_literal(tree, name) is None or _bindings(tree, name) != 1:
            return f"{name} must be one plain string literal, assigned exactly once at top level"
    return None


def _reach_problem(tree: ast.Module) -> str | None:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                modules = [alias.name for alias in aliases]
            case ast.ImportFrom(module=module, names=aliases, level=level):
                modules = ["." * level + (module or "")]
                if modules == ["harnesses"]:
                    modules = [f"harnesses.{alias.name}" for alias in aliases]
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in FORBIDDEN:
                if isinstance(node, ast.Name) or name.startswith("__"):  # re.compile is fine
                    return f"uses {name} (line {node.lineno}): a harness only builds strings and yields requests"
                continue
            case _:
                continue
        for module in modules:
            if module not in IMPORTS and module.split(".")[0] not in IMPORTS:
                return f"imports {module} (line {node.lineno}); allowed are {', '.join(IMPORTS)}"
    return None


def _exam_problem(source: str, tree: ast.Module, exam_phrases: Iterable[str]) -> str | None:
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    text = "\0".join([source, *strings])
    quoted = next((phrase for phrase in exam_phrases if phrase and phrase in text), None)
    return quoted and f"quotes its exam: {quoted!r:.60}; remove everything copied from the tasks it is scored on"
