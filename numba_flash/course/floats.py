"""Finds what a kernel computes in float64 by mistake: `acc = 0.0`, or `acc = 0`, to which float32 is added.

By the rules of Numba, on the text: a float literal is float64, and so is what comes of a float32 and an integer. The
result is right, and slow on a GPU, which has few units for float64.
"""

import ast

FLOAT32, FLOAT64, INTEGER = "float32", "float64", "integer"


def notes(tree, known):
    """A sentence for each line of a kernel that brings in float64. known: {name of a parameter: its type}.

    What is not known, such as other parameters, is taken for what makes no float64; the numbers that the file gives
    names to are known.
    """
    kernels = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_compiled(node)]
    numbers = constants(tree)
    return [note for kernel in kernels for note in Types(kernel, known, numbers).notes()]


def constants(tree):
    """{name: type} of the numbers that a file's own lines, outside of functions, assign."""
    file = ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], [])
    return {target.id: of_number(value) for target, value, _ in assignments(file) if is_number(value)}


def of_number(node):
    if isinstance(node, ast.UnaryOp):
        return of_number(node.operand)
    return INTEGER if isinstance(node, ast.Constant) and type(node.value) is int else FLOAT64


def of_dtype(dtype):
    return {"f4": FLOAT32, "f8": FLOAT64}.get(dtype.str[1:], INTEGER)


def is_compiled(function):
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


class Types:
    """The types of the names of one kernel, joined over all its assignments."""

    def __init__(self, kernel, known, numbers):
        names = [argument.arg for argument in kernel.args.args]
        self.kernel = kernel
        self.assigned = list(assignments(kernel))
        own = {*names, *(target.id for target, *_ in self.assigned)}
        self.numbers = {name: kind for name, kind in numbers.items() if name not in own}
        self.of = self.numbers | {name: known[name] for name in names if name in known}
        self.arrays = {target.id: self.element(value) for target, value, _ in self.assigned if is_array(value)}
        before = None
        while before != self.of:
            before = dict(self.of)
            for target, value, _ in self.assigned:
                if target.id not in self.arrays:
                    self.of[target.id] = joined(self.of.get(target.id), self.type(value))

    def element(self, value):
        last = ast.unparse(value.args[-1] if value.args else value)
        return next((kind for kind in (FLOAT32, FLOAT64) if kind in last), INTEGER)

    def type(self, node):
        """The type of an expression; None where that is not known."""
        if isinstance(node, ast.Constant):
            return {float: FLOAT64, int: INTEGER}.get(type(node.value))
        if isinstance(node, ast.Name):
            return self.of.get(node.id)
        if isinstance(node, ast.Subscript):
            base = ast.unparse(node.value)
            return INTEGER if base.endswith(".shape") else self.arrays.get(base, self.of.get(base, FLOAT32))
        if isinstance(node, ast.UnaryOp):
            return self.type(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = self.type(node.left), self.type(node.right)
            if isinstance(node.op, ast.Pow):
                return left
            return FLOAT64 if left == right == INTEGER and isinstance(node.op, ast.Div) else joined(left, right)
        if isinstance(node, ast.IfExp):
            return joined(self.type(node.body), self.type(node.orelse))
        if isinstance(node, ast.Call):
            return self.result(ast.unparse(node.func), [self.type(argument) for argument in node.args])
        if isinstance(node, ast.Attribute):
            return FLOAT64 if ast.unparse(node) in ("math.inf", "math.pi", "math.e", "np.inf") else INTEGER
        return INTEGER if isinstance(node, ast.Compare | ast.BoolOp) else None

    def result(self, function, types):
        name = function.rpartition(".")[2]
        if name in (FLOAT32, FLOAT64):
            return name
        if name in ("max", "min"):
            total = None
            for one in types:
                total = joined(total, one)
            return total
        if name in ("int", "len", "range") or function.startswith("cuda."):
            return INTEGER
        if function.startswith("math."):
            return FLOAT64 if INTEGER in types or FLOAT64 in types else FLOAT32
        return None

    def notes(self):
        said = set()
        for target, value, line in self.assigned:
            begins = self.type(value) if is_number(value) else None
            if begins in (FLOAT64, INTEGER) and self.of.get(target.id) == FLOAT64 and target.id not in said:
                said.add(target.id)
                text = ast.unparse(value)
                yield (
                    f"Line {line}: `{target.id}` begins with {text} and is float64, in which a GPU is slow: begin with "
                    f"{single(text)}."
                )
        for node in ast.walk(self.kernel):
            sides = meeting(node)
            if any(self.type(side) == FLOAT32 for side in sides):
                for text in (ast.unparse(side) for side in sides if self.brings_float64(side)):
                    yield (
                        f"Line {node.lineno} computes in float64, in which a GPU is slow, because of {text}: write "
                        f"{single(text)}."
                    )

    def brings_float64(self, side):
        """Whether it is no float32, beside one, and could be written as float32(it)."""
        if is_number(side) or (isinstance(side, ast.Name) and side.id in self.numbers):
            return True
        counted = isinstance(side, ast.Name | ast.BinOp | ast.Attribute) or ".shape[" in ast.unparse(side)
        return counted and self.type(side) == INTEGER


def meeting(node):
    """The operands whose types are joined; x ** 2 keeps the type of x."""
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow):
        return node.left, node.right
    if isinstance(node, ast.AugAssign):
        return node.target, node.value
    if isinstance(node, ast.IfExp):
        return node.body, node.orelse
    return node.args if isinstance(node, ast.Call) and ast.unparse(node.func) in ("max", "min") else ()


def single(text):
    return f"float32({text.removesuffix('.0')})"


def assignments(kernel):
    """(target, value, line) for each plain name that is assigned, tuples taken apart."""
    for node in ast.walk(kernel):
        pairs = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AugAssign):
            pairs = [(node.target, ast.BinOp(node.target, node.op, node.value))]
        elif isinstance(node, ast.For):
            pairs = [(node.target, ast.Constant(0))]
        for target, value in pairs:
            if isinstance(target, ast.Name):
                yield target, value, node.lineno
            elif isinstance(target, ast.Tuple):
                parts = value.elts if isinstance(value, ast.Tuple) else [ast.Name("")] * len(target.elts)
                yield from ((one, part, node.lineno) for one, part in zip(target.elts, parts)
                            if isinstance(one, ast.Name))  # fmt: skip


def is_array(value):
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("cuda.shared.array", "cuda.local.array")


def is_number(node):
    """Whether it is a literal, such as 0, -1e30 or -math.inf: something that could be written as float32(it)."""
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in ("math.inf", "math.pi", "math.e", "np.inf")
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def joined(one, other):
    """The type that holds both: float64 for float32 and an integer, as for Numba."""
    if one is None or other is None or one == other:
        return one or other
    return FLOAT64
