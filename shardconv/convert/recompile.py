"""Methods of a module's class, recompiled from their source with a change."""

import ast
import inspect
import textwrap
from collections.abc import Callable


def recompiled(function: Callable[..., object], transformer: ast.NodeTransformer) -> Callable[..., object]:
    """Recompile a method from its source, changed by a transformer of its syntax tree; decorators are applied again.

    Raises:
        ValueError: if it uses names of an enclosing function, or super() without arguments.
    """
    inner = inspect.unwrap(function)
    if inner.__code__.co_freevars:
        names = ", ".join(inner.__code__.co_freevars)
        raise ValueError(f"{inner.__qualname__} uses {names} of an enclosing function, and cannot be recompiled")
    tree = transformer.visit(ast.parse(textwrap.dedent(inspect.getsource(inner))))
    namespace: dict[str, Callable[..., object]] = {}
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(inner), "exec")
    exec(code, inner.__globals__, namespace)  # noqa: S102 - the module's own source
    return namespace[inner.__name__]
