"""How a PTX instruction becomes a function that a kernel can call: Numba's intrinsics and LLVM's inline assembly.

    @instruction("ldmatrix.sync.aligned.m8n8.x4.shared.b16 $result, [$address];")
    def ldmatrix(address: u32) -> vector(u32, 4):
        '''What it does, and where the PTX ISA manual has it.'''

The text is PTX; `$name` stands for the operand of that name, `$result` for what is returned, `$name[0]` for the first
of several registers. Annotations say what an operand is: a number (u32, i32, u64, i64, f32), a `vector` (a tuple in the
kernel, braces in PTX), registers of a local array that are read (`reads`), written (`writes`) or both (`updates`), or a
number in the text itself (`immediate`). Numbers that a kernel passes are converted to the annotated type. Labels and
registers that the text declares belong between { and }, so that the text can occur twice.
"""

import inspect
import re
from typing import NamedTuple

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

u32, i32, u64, i64, f32 = types.uint32, types.int32, types.uint64, types.int64, types.float32
_LLVM = {u32: ir.IntType(32), i32: ir.IntType(32), u64: ir.IntType(64), i64: ir.IntType(64), f32: ir.FloatType()}
_LETTER = {u32: "r", i32: "r", u64: "l", i64: "l", f32: "f", None: "n"}


class vector(NamedTuple):
    """`count` registers of one type, a tuple in the kernel."""

    of: types.Type
    count: int


class Registers(NamedTuple):
    """The first `count` elements of a local array; the compiler keeps them in registers if each index is a constant."""

    of: types.Type
    count: int
    read: bool
    written: bool


def reads(of, count):
    return Registers(of, count, True, False)


def writes(of, count):
    return Registers(of, count, False, True)


def updates(of, count):
    return Registers(of, count, True, True)


device = cuda.jit(device=True, inline="always")  # a device function whose calls are replaced by its body
immediate = object()  # a number that the compiler knows once it has unrolled the loops; it is written into the text


def instruction(text, *, pure=False):
    """Decorator: a function with annotated parameters and no body, as the intrinsic that issues `text`.

    pure: the result depends on the operands alone, so that the compiler may move the instruction, merge two of them or
    leave it out. What is not pure stays where it is and counts as an access to memory.
    """

    def make(function):
        signature = inspect.signature(function)
        operands = [parameter.annotation for parameter in signature.parameters.values()]
        returned = signature.return_annotation
        returned = None if returned is signature.empty else returned

        def typing(typingctx, *given):
            expected = [_type_of(operand, ty) for operand, ty in zip(operands, given, strict=True)]
            if None in expected:
                return None

            def codegen(context, builder, sig, values):
                return _issue(context, builder, sig, values, list(signature.parameters), operands, returned, text, pure)

            result = types.UniTuple(*returned) if isinstance(returned, vector) else returned or types.void
            return result(*expected), codegen

        typing.__name__, typing.__qualname__ = function.__name__, function.__qualname__
        typing.__module__, typing.__doc__ = function.__module__, function.__doc__
        context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        typing.__signature__ = signature.replace(parameters=[context, *signature.parameters.values()])  # Numba asks
        return intrinsic(typing)

    return make


def _type_of(operand, given):
    if operand is immediate:
        return i32
    if isinstance(operand, vector):
        return types.UniTuple(*operand)
    if isinstance(operand, Registers):
        return given if isinstance(given, types.Array) and given.dtype == operand.of else None
    return operand


def _issue(context, builder, sig, values, names, operands, returned, text, pure):
    """One call of inline assembly: results first, then what is read; a register that does both is tied to itself."""
    outputs, inputs, into, places = [], [], [], {}
    if returned:
        of, count = returned if isinstance(returned, vector) else (returned, 1)
        outputs += [of] * count
        places["result"] = (list(range(count)), isinstance(returned, vector))
    for name, operand, ty, value in zip(names, operands, sig.args, values):
        if isinstance(operand, Registers) and operand.written:
            places[name] = (list(range(len(outputs), len(outputs) + operand.count)), True)
            outputs += [operand.of] * operand.count
            into.append((_elements(context, builder, ty, value, operand.count), places[name][0]))
    constraints = ["=" + _LETTER[of] for of in outputs]
    for name, operand, ty, value in zip(names, operands, sig.args, values):
        if isinstance(operand, Registers):
            if not operand.read:
                continue
            read, of = [builder.load(p) for p in _elements(context, builder, ty, value, operand.count)], operand.of
        elif isinstance(operand, vector):
            read, of = list(cgutils.unpack_tuple(builder, value)), operand.of
        else:
            read, of = [value], None if operand is immediate else operand
        tied = name in places
        if not tied:
            first = len(outputs) + len(inputs)
            places[name] = (list(range(first, first + len(read))), isinstance(operand, vector | Registers))
        constraints += [str(n) for n in places[name][0]] if tied else [_LETTER[of]] * len(read)
        inputs += read

    def written(match):
        numbers, braces = places[match[1]]
        if match[2]:
            return f"${numbers[int(match[2])]}"
        listed = ", ".join(f"${n}" for n in numbers)
        return "{" + listed + "}" if braces else listed

    body = re.sub(r"\$([A-Za-z_]\w*)(?:\[(\d+)\])?", written, text)
    if not pure:
        constraints.append("~{memory}")
    llvm = [_LLVM[of] for of in outputs]
    result_type = ir.VoidType() if not llvm else llvm[0] if len(llvm) == 1 else ir.LiteralStructType(llvm)
    function_type = ir.FunctionType(result_type, [value.type for value in inputs])
    call = builder.call(ir.InlineAsm(function_type, body, ",".join(constraints), side_effect=not pure), inputs)
    results = [call] if len(llvm) == 1 else [builder.extract_value(call, n) for n in range(len(llvm))]
    for addresses, numbers in into:
        for address, n in zip(addresses, numbers):
            builder.store(results[n], address)
    if isinstance(returned, vector):
        return cgutils.pack_array(builder, results[: returned.count])
    return results[0] if returned else context.get_dummy_value()


def _elements(context, builder, ty, value, count):
    data = context.make_array(ty)(context, builder, value).data
    return [cgutils.gep(builder, data, n) for n in range(count)]


@intrinsic
def shared_address(typingctx, array):
    """The address of the first element of a shared array as instructions want it: 32 bits, in the shared window."""

    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(shared, _LLVM[u32])

    return u32(array), codegen
