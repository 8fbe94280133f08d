"""Matrix products of a module's own code with its parameters, as of a linear layer with its weight.

Owns the classes behind the module override ``products``: methods recompiled from source with the collectives of column
and row parallel layers around these products.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from shardconv.convert.classes import class_factory, new_class
from shardconv.convert.modules import ParallelProducts
from shardconv.convert.recompile import recompiled

#: Functions of two operands whose result is a product, besides the operator ``@``.
_FUNCTIONS = ("einsum", "matmul", "bmm")
#: Attributes of a parameter that may be read beside its products.
_READABLE = ("dtype", "device")
#: The method of :class:`ParallelProducts` that is applied to a product, by how its parameter is sharded.
_OUTPUTS = {"rowwise": "product_output", "rowwise_shared": "shared_product"}


@class_factory
def with_parallel_products(original: type[nn.Module], products: tuple[tuple[str, str], ...]) -> type[ParallelProducts]:
    """Derive a class from a module's: products with some of its parameters become column or row parallel.

    Args:
        original: the class of the module.
        products: each parameter, and how it is sharded: one of :data:`~shardconv.plan.family.PRODUCTS`.

    Raises:
        ValueError: if a parameter is in no product, or is used otherwise.
    """
    changed: dict[str, object] = {}
    found: set[str] = set()
    for name, function in _methods(original, [f"self.{own}" for own, _ in products]):
        rewriter = _ProductRewriter(dict(products))
        changed[name] = recompiled(function, rewriter)
        if rewriter.problem:
            raise ValueError(f"{function.__qualname__}: {rewriter.problem}: its rules are for other code")
        found |= rewriter.found
    if missing := sorted({name for name, _ in products} - found):
        raise ValueError(
            f"{original.__qualname__} does not have a product with {', '.join(missing)}: its rules are for other code"
        )
    made: type[ParallelProducts] = new_class(original, (ParallelProducts, original), changed)
    return made


def _methods(original: type[nn.Module], texts: Sequence[str]) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield the methods of a class and its bases whose source contains one of some texts, except ``__init__``."""
    bases = [base for base in original.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    for name in sorted({name for base in bases for name in vars(base)} - {"__init__"}):
        function = inspect.getattr_static(original, name)
        if inspect.isfunction(function) and any(text in inspect.getsource(function) for text in texts):
            yield name, function


class _ProductRewriter(ast.NodeTransformer):
    """Insert the collectives around products.

    Attributes:
        found: the parameters with a product.
        problem: a use of a parameter that is not a product; "" for none.
    """

    def __init__(self, products: Mapping[str, str]) -> None:
        self.products, self.found, self.problem = products, set[str](), ""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func).rpartition(".")[2] not in _FUNCTIONS or node.keywords:
            return self.generic_visit(node)
        operands = [one for one in node.args if not isinstance(one, ast.Constant)]
        return self._visit_product(node, operands) if len(operands) == 2 else self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        is_product = isinstance(node.op, ast.MatMult)
        return self._visit_product(node, [node.left, node.right]) if is_product else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr in _READABLE and self._name(node.value):
            return node
        if name := self._name(node):
            self.problem = self.problem or f"uses {name} otherwise than in a product"
        return self.generic_visit(node)

    def _name(self, node: ast.expr) -> str:
        """Return the parameter that an operand is, or is indexed from; "" if it is neither."""
        while isinstance(node, ast.Subscript):
            node = node.value
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self.products:
                return name
        return ""

    def _visit_product(self, node: ast.Call | ast.BinOp, operands: list[ast.expr]) -> ast.AST:
        weights = [one for one in operands if self._name(one)]
        if len(weights) != 1:
            return self.generic_visit(node)
        name = self._name(weights[0])
        self.found.add(name)
        others = {one: self.visit(one) for one in operands if one is not weights[0]}
        if self.products[name] == "colwise":
            others = {one: _call("product_input", visited) for one, visited in others.items()}
        if isinstance(node, ast.Call):
            node.args = [others.get(one, one) for one in node.args]
        else:
            node.left, node.right = (others.get(one, one) for one in (node.left, node.right))
        output = _OUTPUTS.get(self.products[name])
        return _call(output, ast.Constant(name), node) if output else node


def _call(method: str, *values: ast.expr) -> ast.Call:
    """Make a call of a method of the module."""
    return ast.Call(ast.Attribute(ast.Name("self", ast.Load()), method, ast.Load()), list(values), [])
