"""From a kernel's source to the source of a CPU module that does the same, one thread at a time.

What changes: `cuda.syncthreads()` becomes `yield`, so that a kernel with barriers is a generator and each CUDA thread
one instance of it; `cuda.threadIdx.x` and its like become arguments; shared and local arrays become arguments; every
subscript goes through the access hook with the number of its source site; integer closure constants become arguments,
so that one compile serves every block size. Everything else stays as it was written.

The text that comes out names every constant and device function it uses. It is therefore its own cache key.
"""

import ast
import builtins
import contextlib
import importlib
import inspect
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, ModuleType

import numba
import numpy as np
from numba import cuda
from numba.core.dispatcher import Dispatcher
from numba.np.numpy_support import as_dtype

from ..errors import Unsupported

COORDINATES = {
    f"{name}.{axis}": f"_nf_{letter}{axis}"
    for name, letter in (("threadIdx", "t"), ("blockIdx", "b"), ("blockDim", "B"), ("gridDim", "G"))
    for axis in "xyz"
}
THREAD = "_nf_thread"  # the thread's number within its block
STATE = "_nf_state"
FENCES = {"threadfence", "threadfence_block", "threadfence_system"}
WARP = re.compile(
    r"(shfl|vote|all|any|eq|ballot|match)(_\w+)?_sync(_intrinsic)?|syncwarp|activemask|lanemask_lt|laneid"
)
ATOMICS = (
    "add", "sub", "max", "min", "nanmax", "nanmin", "exch", "inc", "dec", "and_", "or_", "xor", "cas",
    "compare_and_swap",
)  # fmt: skip
STATEMENTS = (
    ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Pass, ast.Break,
    ast.Continue,
)  # fmt: skip
EXPRESSIONS = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Constant, ast.Attribute, ast.Subscript,
    ast.Name, ast.Tuple, ast.Slice, ast.Starred,
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A place in the source: an access of `kind` "loads", "stores" or "atomics", or a barrier."""

    file: str
    line: int
    kind: str


@dataclass(frozen=True)
class Array:
    """A shared or local array: the learner's name for it, its shape (integers or names of constants) and dtype."""

    name: str
    shape: tuple
    dtype: np.dtype


@dataclass(frozen=True)
class Function:
    """A kernel, or a device function that it calls: where its source begins, and the source."""

    name: str
    file: str
    first: int
    source: str

    def holds(self, file, line):
        return file == self.file and self.first <= line < self.first + self.source.count("\n") + 1


@dataclass(frozen=True)
class Call:
    """A call of a device function. `given`: (parameter, the name passed for it) of each argument that is a name."""

    caller: Function
    line: int
    callee: Function
    given: tuple


@dataclass
class Program:
    """A kernel rewritten for the CPU."""

    name: str
    parameters: list[str]
    sites: list[Site] = field(default_factory=list)
    barriers: list[Site] = field(default_factory=list)
    notes: list = field(default_factory=list)  # of a recording: names that are assigned, see recorder.py
    shared: dict[str, Array] = field(default_factory=dict)  # by the name of the hidden argument
    local: dict[str, Array] = field(default_factory=dict)
    integers: dict[str, int] = field(default_factory=dict)  # closure constants that became arguments
    constants: dict[str, str] = field(default_factory=dict)  # module-level name -> expression
    functions: list[str] = field(default_factory=list)  # device functions, callees first
    lines: dict[int, Site] = field(default_factory=dict)  # line of `source` -> where it came from
    texts: list[Function] = field(default_factory=list)  # the kernel and its device functions, as they were written
    calls: list[Call] = field(default_factory=list)  # of device functions
    kernel: str = ""
    hidden: list[str] = field(default_factory=list)  # the kernel's arguments before the learner's own
    source: str = ""


def is_kernel(value):
    """Whether `value` is a `@cuda.jit` object: numba's, numba-cuda's, or the simulator's."""
    return type(value).__name__ in ("CUDADispatcher", "FakeCUDAKernel")


def function_of(kernel):
    """The Python function of a `@cuda.jit` object, or of anything a kernel may call; None for other values."""
    if is_kernel(kernel) or isinstance(kernel, Dispatcher):
        return getattr(kernel, "py_func", None) or kernel.fn
    return None


def is_device_function(value):
    return function_of(value) is not None


def rewrite(function, rewriter=None):
    """Rewrite the kernel's Python function; raises `Unsupported`, naming construct and line, for what cannot run.

    rewriter: a kind of `FunctionRewriter` (default: itself) that does it.
    """
    code = function.__code__
    program = Program(function.__name__, list(code.co_varnames[: code.co_argcount]))
    writer = Writer(program, rewriter or FunctionRewriter)
    try:
        program.kernel, program.hidden = writer.emit(function, kernel=True)
    except RecursionError:
        raise Unsupported(f"{function.__name__} holds an expression or a chain of branches that is too deep: split it",
                          kernel=function.__name__) from None  # fmt: skip
    header = [
        f"# {function.__name__}, rewritten by numba_flash for the CPU. Safe to delete.",
        "import numpy as _np",
        "from numba import types as _types",
        "from numba_flash.engine.runtime import *",
    ]
    constants = [f"{name} = {expression}" for name, expression in program.constants.items()]
    program.source = "\n".join([*header, *constants, "", *program.functions, scheduler(program)])
    program.lines = writer.line_map(program.source)
    return program


class Writer:
    """Emits the functions of one program; each device function once."""

    def __init__(self, program, rewriter):
        self.program, self.rewriter = program, rewriter
        self.started = 0  # functions begun, those written into their callers included
        self.emitted = {}  # Python function -> (name in the module, its hidden arguments)
        self.active = []  # functions being rewritten, to find recursion
        self.declared = {}  # (function, line, column) of a shared or local array -> its hidden argument
        self.barriers = {}  # Python function -> whether it synchronises
        self.origins = {}  # module-level function name -> list of Sites, one a statement in walking order

    def emit(self, function, kernel=False):
        if function in self.emitted:
            return self.emitted[function]
        rewriter = self.rewriter(self, function)
        name = f"_nf_function{rewriter.number}_{function.__name__}"
        body = rewriter.body(kernel=kernel)
        hidden = rewriter.hidden_arguments()
        arguments = rewriter.tree.args
        arguments.args = [ast.arg(argument) for argument in hidden] + arguments.args
        definition = ast.FunctionDef(name, arguments, body, [], type_params=[])
        ast.fix_missing_locations(definition)
        self.origins[name] = [
            Site(*getattr(node, "origin", (rewriter.file, rewriter.first_line)), "")
            for node in statements_of(definition)
        ]
        self.program.functions += ["@compiled", ast.unparse(definition), ""]
        self.emitted[function] = name, hidden
        return name, hidden

    def line_map(self, source):
        lines = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name in self.origins:
                for statement, origin in zip(statements_of(node), self.origins[node.name], strict=True):
                    lines[statement.lineno] = origin
        return lines

    def has_barrier(self, function):
        """Whether the function, or a device function it calls, synchronises."""
        if function not in self.barriers:
            self.barriers[function] = self.finds_barrier(function)
        return self.barriers[function]

    def finds_barrier(self, function):
        if function in self.active:
            raise Unsupported(f"{function.__name__} calls itself: CUDA kernels on the CPU cannot recurse",
                              kernel=self.program.name)  # fmt: skip
        self.active.append(function)
        scope = Scope(function)
        try:
            for node in ast.walk(scope.tree):
                if isinstance(node, ast.Call):
                    if scope.cuda_name(node.func) == "syncthreads":
                        return True
                    callee = scope.resolve(node.func)
                    if is_device_function(callee) and self.has_barrier(function_of(callee)):
                        return True
        finally:
            self.active.pop()
        return False


def statements_of(definition):
    return [node for node in ast.walk(definition) if isinstance(node, ast.stmt)]


MISSING = object()


class Scope:
    """A function's syntax tree and what its free names stand for."""

    def __init__(self, function):
        self.function = function
        self.file = function.__code__.co_filename
        self.first_line = function.__code__.co_firstlineno
        try:
            self.source = inspect.getsource(function.__code__)
            self.tree = definition_in(self.source)
        except (OSError, TypeError, SyntaxError, StopIteration):
            raise Unsupported(
                f"the source of {function.__name__} cannot be read: define it with def in a file or a notebook cell",
                kernel=function.__name__,
            ) from None
        self.tree.decorator_list, self.tree.returns = [], None
        if not is_current(function.__code__):
            raise Unsupported(
                f"{function.__name__}: {self.file} has changed since it was imported, and the source is read from it: "
                "import it again",
                kernel=function.__name__,
            )
        for argument in ast.walk(self.tree.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        self.closure = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a name that is bound later, and so not defined yet
                self.closure[name] = cell.cell_contents
        self.flags = names_tested(self.tree)
        stores = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.locals = stores | set(signature_of(function).parameters)

    def resolve(self, node):
        """The object that an expression of free names and attributes stands for, or MISSING."""
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            if isinstance(owner, (ModuleType, type)):
                return getattr(owner, node.attr, MISSING)
            return MISSING
        if not isinstance(node, ast.Name) or node.id in self.locals:
            return MISSING
        for names in (self.closure, self.function.__globals__, vars(builtins)):
            if node.id in names:
                return names[node.id]
        return MISSING

    def cuda_name(self, node):
        """ "threadIdx.x", "atomic.add" and so on, for an expression that means that part of numba.cuda, or None."""
        if isinstance(node, ast.Attribute):
            if self.resolve(node.value) is cuda:
                return node.attr
            owner = self.cuda_name(node.value)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Name):
            value = self.resolve(node)
            return next((name for name in CUDA_OBJECTS if value is CUDA_OBJECTS[name]), None)
        return None


# What Numba accepts as a bare name, from numba.cuda import grid; threadIdx and its like must be written cuda.threadIdx.
CUDA_NAMES = [
    "grid", "gridsize", "syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or",
    *FENCES, *(name for name in dir(cuda) if WARP.fullmatch(name)),
]  # fmt: skip
CUDA_OBJECTS = {name: getattr(cuda, name) for name in CUDA_NAMES if hasattr(cuda, name)}


class FunctionRewriter(ast.NodeTransformer):
    """Rewrites one function. `prefix` renames the locals of a device function that is written into its caller."""

    def __init__(self, writer, function, host=None, prefix=""):
        self.writer, self.program, self.host, self.prefix = writer, writer.program, host, prefix
        self.scope = Scope(function)
        self.tree, self.file, self.first_line = self.scope.tree, self.scope.file, self.scope.first_line
        self.used = host.used if host else set()
        self.number = writer.started
        writer.started += 1
        self.temporaries = 0
        self.text = text_of(self.scope)
        if self.text not in self.program.texts:
            self.program.texts.append(self.text)

    # --- helpers

    def line(self, node):
        return self.first_line + node.lineno - 1

    def unsupported(self, node, message):
        line = self.line(node)
        where = f"{self.scope.function.__name__} ({self.file}, line {line})"
        return Unsupported(f"{where}: {message}", kernel=self.program.name, file=self.file, line=line)

    def hidden_arguments(self):
        order = [*COORDINATES.values(), THREAD, STATE]
        known = [name for name in order if name in self.used]
        return known + sorted(self.used - set(known))

    def use(self, name):
        self.used.add(name)
        return ast.Name(name, ast.Load())

    def site(self, node, kind, sites=None):
        sites = self.program.sites if sites is None else sites
        sites.append(Site(self.file, self.line(node), kind))
        return ast.Constant(len(sites) - 1)

    def temporary(self):
        self.temporaries += 1
        return f"{self.prefix}_nf_{self.number}_{self.temporaries}"

    def constant(self, name, value, node):
        """A module-level name for a value that the function takes from outside."""
        expression = self.expression_of(value)
        if expression is None:
            shown = re.sub(r"\s+", " ", repr(value))[:60]
            raise self.unsupported(node, f"{name} = {shown} cannot be used inside a kernel: {self.advice(value)}")
        base = "_nf_c_" + name.replace(".", "_")  # apart from the engine's own names
        number, unique = 1, base
        while self.program.constants.get(unique, expression) != expression:
            number += 1
            unique = f"{base}_{number}"
        self.program.constants[unique] = expression
        return ast.Name(unique, ast.Load())

    @staticmethod
    def advice(value):
        if isinstance(value, np.ndarray):
            return "pass the array as an argument"
        if isinstance(value, type):
            return "the CPU engine lacks this type; what belongs to cuda is written cuda.NAME in the kernel"
        if callable(value):
            return "make it a device function with @cuda.jit(device=True)"
        return "pass it as an argument, or use a number, a tuple of numbers or a dtype"

    def expression_of(self, value):
        """Source text for a constant, or None. Text, since it becomes part of the cache key."""
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, int):  # an IntEnum
            return repr(int(value))
        if isinstance(value, np.generic) and value.dtype.kind in "biufc" and value.dtype.char not in "egG":
            return f"_np.{type(value).__name__}({self.expression_of(value.item())})"
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        if isinstance(value, complex):
            return f"complex({self.expression_of(value.real)}, {self.expression_of(value.imag)})"
        if type(value) is tuple:
            items = [self.expression_of(item) for item in value]
            return None if None in items else "(" + "".join(item + ", " for item in items) + ")"
        if isinstance(value, np.dtype):
            return f"_np.dtype({value.str!r})"
        if isinstance(value, numba.types.Type):
            return f"_types.{value}" if getattr(numba.types, str(value), None) == value else None
        if isinstance(value, ModuleType):
            return f"__import__({value.__name__!r})" if value in (math, np, numba) else None
        home, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if isinstance(value, type) and value in (np.float16, np.longdouble, np.clongdouble):
            return None
        if isinstance(value, np.ufunc):
            home = "numpy"
        if home == "builtins" and name in vars(builtins):
            return name
        if home in ("math", "numpy", "operator", "_operator"):
            home = home.lstrip("_")
            return (
                f"__import__({home!r}).{name}" if getattr(importlib.import_module(home), name, None) is value else None
            )
        return None

    # --- the function as a whole

    def body(self, kernel):
        self.writer.active.append(self.scope.function)
        arguments = self.tree.args
        self.check_arguments()
        if kernel:
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
                    raise self.unsupported(node, "a kernel returns nothing: store the result in an array")
        for position, default in enumerate(arguments.defaults):
            value = self.scope.function.__defaults__[position]
            arguments.defaults[position] = ast.copy_location(self.constant("default", value, default), default)
        body = self.block(self.tree.body)
        self.writer.active.pop()
        return body

    def check_arguments(self):
        arguments = self.tree.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
            raise self.unsupported(self.tree, "*args, **kwargs and keyword-only arguments do not exist in a kernel")

    def block(self, statements):
        result = []
        for statement in statements:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if not isinstance(statement, STATEMENTS):
                raise self.unsupported(statement, f"{describe(statement)} cannot stand in a kernel")
            for new in as_list(self.visit(statement)):
                for node in ast.walk(new):
                    if isinstance(node, ast.stmt) and not hasattr(node, "origin"):
                        node.origin = self.file, self.line(statement)
                result.append(new)
        return result or [ast.Pass()]

    # --- statements

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            name = self.scope.cuda_name(node.value.func)
            if name == "syncthreads":
                return ast.Expr(ast.Yield(self.site(node, "barrier", self.program.barriers)))
            if name in FENCES:
                return ast.Pass()
            if self.calls_barrier(node.value):
                return self.inline(node.value, None)
        return ast.Expr(self.visit(node.value))

    def visit_AnnAssign(self, node):
        if node.value is None:
            return ast.Pass()
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Assign(self, node):
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if isinstance(node.value, ast.Call) and self.calls_barrier(node.value):
                return self.inline(node.value, self.visit(node.targets[0]))
            value = self.declaration(node.value, name) or self.visit(node.value)
            return ast.Assign([self.visit(node.targets[0])], value)
        value = self.visit(node.value)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
            return self.assign(node.targets[0], value)
        names = all(isinstance(target, ast.Name) or is_name_tuple(target) for target in node.targets)
        if names:
            return ast.Assign([self.visit(target) for target in node.targets], value)
        whole = self.temporary()
        result = [ast.Assign([ast.Name(whole, ast.Store())], value)]
        for target in node.targets:
            result += as_list(self.assign(target, ast.Name(whole, ast.Load())))
        return result

    def assign(self, target, value):
        """Statements for target = value, the value already rewritten."""
        if isinstance(target, ast.Subscript):
            return ast.Expr(self.store(target, value))
        if isinstance(target, ast.Name):
            return ast.Assign([self.visit(target)], value)
        if not isinstance(target, ast.Tuple):
            raise self.unsupported(target, f"a {describe(target)} cannot be assigned to in a kernel")
        parts = [self.temporary() for _ in target.elts]
        unpack = ast.Tuple([ast.Name(part, ast.Store()) for part in parts], ast.Store())
        result = [ast.Assign([unpack], value)]
        for part, element in zip(parts, target.elts, strict=True):
            result += as_list(self.assign(element, ast.Name(part, ast.Load())))
        return result

    def visit_AugAssign(self, node):
        target = node.target
        if not isinstance(target, ast.Subscript):
            return ast.AugAssign(self.visit(target), node.op, self.visit(node.value))
        before = []

        def once(part):
            """The visited part, which may stand twice: through a name, unless to evaluate it twice is the same."""
            visited = self.visit(part)
            if is_pure(part):
                return visited
            name = self.temporary()
            before.append(ast.Assign([ast.Name(name, ast.Store())], visited))
            return ast.Name(name, ast.Load())

        container, index = once(target.value), once(target.slice)
        old = call("load", container, index, self.site(target, "loads"))
        new = ast.BinOp(old, node.op, self.visit(node.value))
        return [*before, ast.Expr(call("store", new, container, index, self.site(target, "stores")))]

    def visit_For(self, node):
        iterator, target = self.visit(node.iter), self.visit(node.target)
        body = [self.stop_check(), *self.block(node.body)]
        return ast.For(target, iterator, body, self.block(node.orelse) if node.orelse else [])

    def visit_While(self, node):
        body = [self.stop_check(), *self.block(node.body)]
        return ast.While(self.visit(node.test), body, self.block(node.orelse) if node.orelse else [])

    def stop_check(self):
        return ast.If(call("stopped", self.use(STATE)), [ast.Break()], [])

    def visit_If(self, node):
        return ast.If(self.visit(node.test), self.block(node.body), self.block(node.orelse) if node.orelse else [])

    # --- expressions

    def visit(self, node):
        if isinstance(node, ast.expr) and not isinstance(node, EXPRESSIONS):
            raise self.unsupported(node, f"{describe(node)} cannot stand in a kernel")
        return super().visit(node)

    def visit_Name(self, node):
        if node.id in self.scope.locals:
            return ast.Name(self.prefix + node.id, node.ctx)
        return self.outside(node, node.id)

    def outside(self, node, name):
        """A value from a closure, a global or a module."""
        value = self.scope.resolve(node)
        cuda_name = self.scope.cuda_name(node)
        if cuda_name:
            return self.cuda_value(node, cuda_name)
        if value is MISSING:
            raise self.unsupported(node, f"the name {name!r} is not defined")
        is_integer = isinstance(value, (int, np.int64)) and not isinstance(value, bool) and abs(int(value)) < 2**63
        from_closure = isinstance(node, ast.Name) and node.id in self.scope.closure and node.id not in self.scope.flags
        if is_integer and from_closure:
            hidden = f"_nf_int{self.number}_{self.prefix}{name}"
            self.program.integers[hidden] = int(value)
            return self.use(hidden)
        return self.constant(name, value, node)

    def visit_Attribute(self, node):
        if self.scope.cuda_name(node) or self.scope.resolve(node) is not MISSING:
            return self.outside(node, ast.unparse(node))
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if (
            isinstance(root, ast.Name)
            and self.scope.resolve(root) is not MISSING
            and not self.scope.cuda_name(node.value)
        ):
            raise self.unsupported(
                node, f"{ast.unparse(node)} cannot be used inside a kernel: assign it to a name outside first"
            )
        return ast.Attribute(self.visit(node.value), node.attr, node.ctx)

    def cuda_value(self, node, name):
        if name in COORDINATES:
            return self.use(COORDINATES[name])
        if name == "warpsize":
            return ast.Constant(32)
        if f"{name}.x" in COORDINATES:
            return call("Dim3", *(self.use(COORDINATES[f"{name}.{axis}"]) for axis in "xyz"))
        if WARP.fullmatch(name.split(".")[0]):
            raise self.unsupported(
                node,
                f"cuda.{name} is a warp primitive, and the CPU engine has no warps: "
                "exchange values through shared memory and cuda.syncthreads(), or run on a GPU",
            )
        if name in ("grid", "gridsize", "syncthreads", "shared.array", "local.array"):
            raise self.unsupported(node, f"cuda.{name} is a function, and nothing calls it: write cuda.{name}(…)")
        raise self.unsupported(node, f"cuda.{name} is not available on the CPU engine here: run this kernel on a GPU")

    def visit_Subscript(self, node):
        if not isinstance(node.ctx, ast.Load):
            raise self.unsupported(node, "a subscript cannot be a loop variable")
        if isinstance(node.value, ast.Attribute) and node.value.attr in ("shape", "strides"):
            return ast.Subscript(self.visit(node.value), self.visit(node.slice), node.ctx)
        return call("load", self.visit(node.value), self.visit(node.slice), self.site(node, "loads"))

    def store(self, target, value):
        return call("store", value, self.visit(target.value), self.visit(target.slice), self.site(target, "stores"))

    def visit_Slice(self, node):
        bounds = [self.visit(part) if part else ast.Constant(None) for part in (node.lower, node.upper, node.step)]
        return call("slice", *(bounds if node.step else bounds[:2]))

    def visit_Call(self, node):
        name = self.scope.cuda_name(node.func)
        if name:
            return self.cuda_call(node, name)
        callee = self.scope.resolve(node.func)
        if is_device_function(callee):
            if self.calls_barrier(node):
                raise self.unsupported(
                    node, f"{callee.__name__} holds a barrier, so its call must stand alone: x = {callee.__name__}(...)"
                )
            self.note_call(node, function_of(callee))
            function, hidden = self.writer.emit(function_of(callee))
            arguments = [self.use(argument) for argument in hidden] + [self.visit(part) for part in node.args]
            keywords = [ast.keyword(word.arg, self.visit(word.value)) for word in node.keywords]
            return ast.Call(ast.Name(function, ast.Load()), arguments, keywords)
        return self.generic_visit(node)

    def note_call(self, node, callee):
        """Remember which names a call hands on, for those who ask where a device function gets a tensor from."""
        given = [*zip(signature_of(callee).parameters, node.args), *((word.arg, word.value) for word in node.keywords)]
        given = tuple((parameter, value.id) for parameter, value in given if isinstance(value, ast.Name))
        self.program.calls.append(Call(self.text, self.line(node), text_of(Scope(callee)), given))

    def cuda_call(self, node, name):
        if name in ("grid", "gridsize"):
            first, second = ("_nf_b", "_nf_B") if name == "grid" else ("_nf_G", "_nf_B")
            if len(node.args) != 1 or not isinstance(node.args[0], ast.Constant) or node.args[0].value not in (1, 2, 3):
                raise self.unsupported(node, f"cuda.{name} takes the number of dimensions: 1, 2 or 3")
            parts = []
            for axis in "xyz"[: node.args[0].value]:
                part = ast.BinOp(self.use(first + axis), ast.Mult(), self.use(second + axis))
                parts.append(ast.BinOp(part, ast.Add(), self.use("_nf_t" + axis)) if name == "grid" else part)
            return parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load())
        if name.startswith("atomic."):
            return self.atomic(node, name.removeprefix("atomic."))
        declared = self.declaration(node, "")
        if declared:
            return declared
        if name == "syncthreads":
            raise self.unsupported(node, "cuda.syncthreads() must be a statement of its own")
        return self.cuda_value(node.func, name)

    def atomic(self, node, operation):
        if operation not in ATOMICS or node.keywords:
            raise self.unsupported(node, f"cuda.atomic.{operation} is not available on the CPU engine here")
        arguments = [self.visit(part) for part in node.args]
        if operation == "compare_and_swap":
            operation = "cas"
            arguments.insert(1, ast.Constant(0))
        target = call("cell", *arguments[:2], self.site(node, "atomics"))
        return call(f"atomic_{operation.rstrip('_')}", target, *arguments[2:])

    def declaration(self, node, name):
        """`cuda.shared.array(...)` or `cuda.local.array(...)` as the argument it becomes, or None for anything else."""
        kind = isinstance(node, ast.Call) and self.scope.cuda_name(node.func)
        if kind not in ("shared.array", "local.array"):
            return None
        given = dict(zip(("shape", "dtype"), node.args, strict=False)) | {
            word.arg: word.value for word in node.keywords
        }
        if not {"shape", "dtype"} <= set(given):
            raise self.unsupported(node, f"cuda.{kind} needs a shape and a dtype")
        space = self.program.shared if kind == "shared.array" else self.program.local
        place = (self.scope.function, node.lineno, node.col_offset)
        if place in self.writer.declared:  # a device function that is written into its callers twice
            return self.declared(self.writer.declared[place], kind)
        hidden = f"_nf_{kind.split('.')[0]}{len(space)}"
        space[hidden] = Array(
            name or hidden, self.constant_shape(given["shape"], kind), self.constant_dtype(given["dtype"])
        )
        self.writer.declared[place] = hidden
        return self.declared(hidden, kind)

    def declared(self, hidden, kind):
        argument = self.use(hidden)
        if kind == "shared.array":
            return argument
        return call("poison", call("load", argument, self.use(THREAD), ast.Constant(0)))

    def constant_shape(self, node, kind):
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        shape = []
        for part in parts:
            value = self.scope.resolve(part)
            if not any(isinstance(n, (ast.Name, ast.Call)) for n in ast.walk(part)):  # 32, or 32 + 1
                value = eval(compile(ast.Expression(part), "<shape>", "eval"), {})
            if isinstance(value, tuple) and not isinstance(node, ast.Tuple):
                shape += value
            elif isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 0:
                hidden = self.outside(part, ast.unparse(part)) if isinstance(part, ast.Name) else None
                shape.append(hidden.id if hidden is not None and hidden.id in self.program.integers else int(value))
            else:
                raise self.unsupported(
                    part,
                    f"the shape {ast.unparse(node)} of cuda.{kind} must be a compile-time constant: a number, "
                    "or a name for one that is defined outside the kernel (write T4 = T * 4 there)",
                )
        return tuple(shape)

    def constant_dtype(self, node):
        value = self.scope.resolve(node)
        try:
            dtype = as_dtype(value) if isinstance(value, numba.types.Type) else np.dtype(value)
        except (TypeError, NotImplementedError):
            dtype = np.dtype(object)
        if dtype.kind not in "biufc" or dtype.char in "egG":
            name = ast.unparse(node)
            raise self.unsupported(node, f"{name} is no dtype of the CPU engine: use numba.float32 and the like")
        return dtype

    # --- device functions with a barrier are written into their caller

    def calls_barrier(self, node):
        callee = self.scope.resolve(node.func)
        return is_device_function(callee) and self.writer.has_barrier(function_of(callee))

    def inline(self, node, result):
        """The body of a device function in place of its call; `result` receives what it returns."""
        callee = function_of(self.scope.resolve(node.func))
        inner = self.writer.rewriter(self.writer, callee, host=self, prefix=f"{self.temporary()}_")
        inner.check_arguments()
        try:
            bound = signature_of(callee).bind(*node.args, **{word.arg: word.value for word in node.keywords})
        except TypeError as error:
            raise self.unsupported(node, f"{callee.__name__}: {error}") from None
        self.note_call(node, callee)
        statements = []
        for name, parameter in signature_of(callee).parameters.items():
            value = (
                self.visit(bound.arguments[name])
                if name in bound.arguments
                else self.constant(name, parameter.default, node)
            )
            statements.append(ast.Assign([ast.Name(inner.prefix + name, ast.Store())], value))
        *body, last = inner.tree.body
        returns = [n for n in ast.walk(inner.tree) if isinstance(n, ast.Return) and n is not last]
        if returns:
            raise inner.unsupported(returns[0], "a device function with a barrier returns once, in its last line")
        self.writer.active.append(callee)
        statements += inner.block(body if isinstance(last, ast.Return) else [*body, last])
        value = inner.visit(last.value) if isinstance(last, ast.Return) and last.value else ast.Constant(None)
        self.writer.active.pop()
        statements.append(ast.Assign([result], value) if result is not None else ast.Expr(value))
        return statements


def text_of(scope):
    return Function(scope.function.__name__, scope.file, scope.first_line, scope.source.rstrip("\n"))


def names_tested(tree):
    """The names that stand alone as a condition, as in `if causal:` or `if not causal and ...`.

    Integers among them stay constants, so that Numba drops the branch that is not taken.
    """
    found = set()

    def conditions(test):
        if isinstance(test, ast.Name):
            found.add(test.id)
        elif isinstance(test, ast.UnaryOp):
            conditions(test.operand)
        elif isinstance(test, ast.BoolOp):
            for part in test.values:
                conditions(part)

    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            conditions(node.test)
    return found


def signature_of(function):
    return inspect.signature(function, follow_wrapped=False)


def definition_in(source):
    """The function definition in a piece of source, indented or not; its first line is line 1."""
    if source[:1].isspace():
        tree = ast.parse("if True:\n" + source)
        ast.increment_lineno(tree, -1)
    else:
        tree = ast.parse(source)
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_current(code):
    """Whether the text that the source is read from still compiles to this code: it does not after an edit."""
    lines, _ = inspect.findsource(code)
    try:
        return code in codes_of("".join(lines), code.co_filename)
    except SyntaxError:
        return False


@lru_cache(maxsize=8)
def codes_of(text, filename):
    """Every code object that a file's text compiles to."""
    found, waiting = set(), [compile(text, filename, "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        found.add(code)
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


def call(name, *arguments):
    """A call of the access hook or the run-time module, under a name that no kernel uses."""
    return ast.Call(ast.Name(f"_nf_{name}", ast.Load()), list(arguments), [])


def as_list(nodes):
    return nodes if isinstance(nodes, list) else [nodes]


def is_none(node):
    return isinstance(node, ast.Constant) and node.value is None


def is_name_tuple(node):
    return isinstance(node, ast.Tuple) and all(isinstance(part, ast.Name) for part in node.elts)


def is_pure(node):
    """Whether evaluating the index twice is the same as once."""
    return not any(isinstance(part, (ast.Call, ast.Subscript)) for part in ast.walk(node))


def describe(node):
    """A node of the syntax tree in words, with its article."""
    names = {
        "ListComp": "list comprehension", "GeneratorExp": "generator expression", "DictComp": "dict comprehension",
        "SetComp": "set comprehension", "JoinedStr": "string", "NamedExpr": "assignment expression (:=)",
        "FunctionDef": "nested function", "ClassDef": "class", "Delete": "del statement",
        "ImportFrom": "import statement", "Starred": "starred expression", "YieldFrom": "yield",
    }  # fmt: skip
    kind = type(node).__name__
    name = names.get(kind, kind.lower() + " statement" * isinstance(node, ast.stmt))
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def scheduler(program):
    """The source of `run`, which steps every thread of a block from barrier to barrier, block after block."""
    hidden = [*program.shared, *program.local, *program.integers]
    given = [f"_nf_given_{name}" for name in program.parameters]
    arguments = ", ".join([STATE, *hidden, *given])
    passed = {name: name for name in [STATE, *hidden]}
    passed |= {f"_nf_t{axis}": f"threads[u, {column}]" for column, axis in enumerate("xyz")}
    passed |= {THREAD: "threads[u, 3]"}
    passed |= {f"_nf_{letter}{axis}": f"{letter}{axis}" for letter in "bBG" for axis in "xyz"}
    thread = f"{program.kernel}({', '.join([*(passed[name] for name in program.hidden), *given])})"
    poisons = "\n".join(f"        _nf_poison({name})" for name in program.shared) or "        pass"
    head = f"""
@compiled_and_cached
def run(first, last, order, threads, Bx, By, Bz, Gx, Gy, Gz, {arguments}):
    words = {STATE}.words
    n = threads.shape[0]
    for turn in range(first, last):
        block = order[turn] if order.size else turn
        bx, by, bz = block % Gx, block // Gx % Gy, block // (Gx * Gy)
{poisons}
        words[NOW_BLOCK], words[PHASE], words[TURN] = block, words[PHASE] + 1, turn
"""
    if not program.barriers:
        return (
            head
            + f"""\
        for u in range(n):
            words[NOW_THREAD] = threads[u, 3]
            {thread}
            if words[STOP] == STOP_NOW:
                return
        if words[KIND]:
            return
"""
        )
    return (
        head
        + f"""\
        live = [{thread} for u in range(n)]
        barrier = 0
        while barrier >= 0:
            for u in range(n):
                words[NOW_THREAD] = threads[u, 3]
                one = live[u]
                here = -1
                for here in one:
                    break
                live[u] = one
                if words[STOP] == STOP_NOW:
                    return
                if u == 0:
                    barrier = here
                elif here != barrier:
                    diverge(words, barrier, threads[0, 3], here, threads[u, 3])
                    return
            if words[KIND]:
                return
            words[PHASE] += 1
"""
    )
