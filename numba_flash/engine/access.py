"""The access hook: every subscript of a kernel that runs on the CPU goes through `load`, `store` or `cell`.

A kernel's arrays become `Tensor`s: plain structs (pointer, shape, counters) that no reference count follows. One access
checks the index, counts itself at its source site, in strict mode looks for races and for memory nobody wrote, and only
then touches memory. A faulty access is kept once, goes to a dummy element, and tells the launch to stop. In a recording
(recorder.py) the access also leaves an entry in the launch's log.
"""

import operator

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.cpython import slicing
from numba.extending import (
    NativeValue,
    intrinsic,
    make_attribute_wrapper,
    models,
    overload,
    overload_attribute,
    register_jitable,
    register_model,
    typeof_impl,
    unbox,
)
from numba.np.numpy_support import as_dtype as numpy_dtype

I64 = ir.IntType(64)

# The launch's state: int64 words that the kernel and the launching thread share.
KIND, SITE, TENSOR, AXIS, INDEX, SIZE, BLOCK, THREAD = range(8)  # the first error
OTHER_SITE, OTHER_BLOCK, OTHER_THREAD = 8, 9, 10  # the second party of a race
STOP, NOW_BLOCK, NOW_THREAD, PHASE, TURN = 11, 12, 13, 14, 15
LATE = 16  # loop turns since a read of memory that nothing wrote
DUMMY = 18  # 16-byte element that absorbs faulty accesses
# A recording: its log, the entries it has room for, those made so far, those that stop the launch; the kernel's line.
LOG, LOG_SIZE, LOGGED, LOG_LIMIT, NOW_LINE = 20, 21, 22, 23, 24
STATE_WORDS = 25

RUN_ON, STOP_NOW, STOP_SOON = 0, 1, 2  # values of STOP
PATIENCE = 2**20  # loop turns that a thread may still take after STOP_SOON, so that a race can explain the read

OUT_OF_BOUNDS, READ_ONLY, DIVERGENCE, RACE, UNINITIALIZED = 1, 2, 3, 4, 5  # values of KIND

# The shadow of one element in strict mode: three records (read, written, atomic) of who touched it, then WRITTEN.
EPOCH, THREAD_THEN, SITE_THEN, FIRST_BLOCK, FIRST_SITE = range(5)
RECORD, WRITTEN, SHADOW_WORDS = 5, 15, 16
READ, WRITE, ATOMIC = 0, 1, 2  # kinds of access
NOTE = 3  # of an entry in the log: a name was assigned

# An entry of the log, four int64 words: WHEN = phase · 2³² + line of the kernel; WHAT = tensor · 2⁴⁸ + thread · 2³² +
# site · 8 + kind · 2 + (1 where the value is a float64); the element; the value.
ENTRY_WORDS = 4


class StateType(types.Type):
    def __init__(self):
        super().__init__("nf.State")


class TensorType(types.Type):
    """`space` is "global" (counted), "shared" or "local"; `layout` "C" or "A" as in Numba's arrays."""

    def __init__(self, dtype, ndim, layout, space, strict, recorded=False):
        self.dtype, self.ndim, self.layout, self.space, self.strict = dtype, ndim, layout, space, strict
        self.recorded = recorded
        super().__init__(f"nf.Tensor({dtype}, {ndim}, {layout}, {space}, {strict}{', recorded' * recorded})")

    def view(self, ndim, layout):
        return TensorType(self.dtype, ndim, layout, self.space, self.strict, self.recorded)


@register_model(StateType)
class StateModel(models.StructModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, [("words", types.CPointer(types.int64))])


@register_model(TensorType)
class TensorModel(models.StructModel):
    def __init__(self, manager, fe_type):
        extent = types.UniTuple(types.int64, fe_type.ndim)
        members = [
            ("data", types.CPointer(fe_type.dtype)),
            ("state", types.CPointer(types.int64)),
            ("tag", types.int64),
        ]
        members.append(("shape", extent))
        if fe_type.layout == "A":
            members.append(("strides", extent))
        if fe_type.space == "global":
            members.append(("counts", types.CPointer(types.int64)))
        if fe_type.strict:
            members += [("shadow", types.CPointer(types.int32)), ("base", types.int64)]
        if fe_type.recorded:
            members.append(("first", types.int64))
        super().__init__(manager, fe_type, members)


make_attribute_wrapper(StateType, "words", "words")
make_attribute_wrapper(TensorType, "shape", "shape")


class State:
    """The launching thread's side of the state words."""

    numba_type = StateType()

    def __init__(self):
        self.words = np.zeros(STATE_WORDS, np.int64)
        self.fields = np.array([self.words.ctypes.data], np.int64)


class Tensor:
    """One array as a kernel sees it. `tag` numbers it for error messages; `counts` has one word per source site;
    `shadow` has the history of the elements from address `base` on. `recorded`: accesses go to the launch's log.
    """

    def __init__(self, array, state, tag, space, counts=None, shadow=None, base=0, recorded=False):
        layout = "C" if array.flags.c_contiguous else "A"
        self.numba_type = TensorType(typeof(array).dtype, array.ndim, layout, space, shadow is not None, recorded)
        self.keep_alive = array, state, counts, shadow
        fields = [array.ctypes.data, state.words.ctypes.data, 2 * tag + (not array.flags.writeable), *array.shape]
        if layout == "A":
            fields += array.strides
        if space == "global":
            fields.append(counts.ctypes.data)
        if shadow is not None:
            fields += [shadow.ctypes.data, base]
        if recorded:
            fields.append(array.ctypes.data)
        self.fields = np.array(fields, np.int64)


@typeof_impl.register(State)
@typeof_impl.register(Tensor)
def typeof_argument(value, context):
    return value.numba_type


@unbox(StateType)
@unbox(TensorType)
def unbox_argument(typ, obj, c):
    """Read the struct from the `fields` words, in the order of the model's members."""
    array_type = types.Array(types.int64, 1, "C")
    attribute = c.pyapi.object_getattr_string(obj, "fields")
    fields = c.unbox(array_type, attribute).value
    words = cgutils.create_struct_proxy(array_type)(c.context, c.builder, value=fields).data
    struct = cgutils.create_struct_proxy(typ)(c.context, c.builder)
    position = 0

    def word():
        nonlocal position
        position += 1
        return c.builder.load(cgutils.gep_inbounds(c.builder, words, position - 1))

    model = c.context.data_model_manager[typ]
    for name, member in zip(model._fields, model._members, strict=True):
        if isinstance(member, types.CPointer):
            setattr(struct, name, c.builder.inttoptr(word(), c.context.get_value_type(member)))
        elif isinstance(member, types.UniTuple):
            setattr(struct, name, cgutils.pack_array(c.builder, [word() for _ in range(member.count)], ty=I64))
        else:
            setattr(struct, name, word())
    c.context.nrt.decref(c.builder, array_type, fields)
    c.pyapi.decref(attribute)
    return NativeValue(struct._getvalue())


# --- one access -------------------------------------------------------------------------------------------------------


def constant(value):
    return ir.Constant(I64, value)


def word_pointer(builder, words, position):
    return builder.gep(words, [constant(position)])


def recorder(module, words_type):
    """The LLVM function that keeps the launch's first error: cold, out of line, one a module."""
    function_type = ir.FunctionType(ir.VoidType(), [words_type] + [I64] * 6)
    function = cgutils.get_or_insert_function(module, function_type, "numba_flash_record")
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        function.attributes.add("cold")
        builder = ir.IRBuilder(function.append_basic_block())
        words, *details = function.args
        first = builder.icmp_signed("==", builder.load(word_pointer(builder, words, KIND)), constant(0))
        with builder.if_then(first):
            for position, detail in zip((KIND, SITE, TENSOR, AXIS, INDEX, SIZE), details, strict=True):
                builder.store(detail, word_pointer(builder, words, position))
            for now, then in ((NOW_BLOCK, BLOCK), (NOW_THREAD, THREAD)):
                builder.store(builder.load(word_pointer(builder, words, now)), word_pointer(builder, words, then))
            builder.store(constant(1), word_pointer(builder, words, STOP))
        builder.ret_void()
    return function


def element_pointer(context, builder, tensor_type, tensor, indices, site, access):
    """Check `indices` (int64 values), count the access at `site`, and return where the element lies."""
    shape = cgutils.unpack_tuple(builder, tensor.shape)
    outside = [builder.icmp_unsigned(">=", index, size) for index, size in zip(indices, shape, strict=True)]
    bad = outside[0]
    for test in outside[1:]:
        bad = builder.or_(bad, test)
    read_only = None
    if access != READ and tensor_type.space == "global":
        read_only = builder.trunc(tensor.tag, ir.IntType(1))
        bad = builder.or_(bad, read_only)
    with builder.if_then(bad, likely=False):
        kind, axis, index, size = constant(READ_ONLY), constant(0), constant(0), constant(0)
        for position in reversed(range(tensor_type.ndim)):
            here = outside[position]
            kind = builder.select(here, constant(OUT_OF_BOUNDS), kind)
            axis = builder.select(here, constant(position), axis)
            index = builder.select(here, indices[position], index)
            size = builder.select(here, shape[position], size)
        tag = builder.ashr(tensor.tag, constant(1))
        builder.call(
            recorder(builder.module, tensor.state.type), [tensor.state, kind, constant(site), tag, axis, index, size]
        )
    pointer = offset_pointer(builder, tensor_type, tensor, indices)
    dummy = builder.bitcast(word_pointer(builder, tensor.state, DUMMY), pointer.type)
    pointer = builder.select(bad, dummy, pointer)
    if tensor_type.space == "global":
        count = word_pointer(builder, tensor.counts, site)
        builder.store(builder.add(builder.load(count), constant(1)), count)
    if tensor_type.strict:
        watch(context, builder, tensor_type, tensor, pointer, bad, site, access)
    return pointer


def offset_pointer(builder, tensor_type, tensor, indices):
    if tensor_type.layout == "A":
        data = builder.bitcast(tensor.data, ir.IntType(8).as_pointer())
        strides = cgutils.unpack_tuple(builder, tensor.strides)
        for index, stride in zip(indices, strides, strict=True):
            data = builder.gep(data, [builder.mul(index, stride)])
        return builder.bitcast(data, tensor.data.type)
    offset = constant(0)
    for index, size in zip(indices, cgutils.unpack_tuple(builder, tensor.shape), strict=False):
        offset = builder.add(builder.mul(offset, size), index)
    for size in cgutils.unpack_tuple(builder, tensor.shape)[len(indices) :]:
        offset = builder.mul(offset, size)
    return builder.gep(tensor.data, [offset])


def watch(context, builder, tensor_type, tensor, pointer, bad, site, access):
    """Strict mode: hand the access to `touch`, which knows who touched the element before."""
    itemsize = context.get_abi_sizeof(context.get_data_type(tensor_type.dtype))
    with builder.if_then(builder.not_(bad)):
        distance = builder.sub(builder.ptrtoint(pointer, I64), tensor.base)
        element = builder.sdiv(distance, constant(itemsize))
        signature = types.void(types.CPointer(types.int64), types.CPointer(types.int32), *[types.int64] * 4)
        tag = builder.ashr(tensor.tag, constant(1))
        arguments = [tensor.state, tensor.shadow, element, tag, constant(site), constant(access)]
        context.compile_internal(builder, touch, signature, arguments)


# --- a recording ------------------------------------------------------------------------------------------------------


def log_writer(module, words_type):
    """The LLVM function that appends an entry to the log, or only counts it where the log is full; one a module."""
    function_type = ir.FunctionType(ir.VoidType(), [words_type] + [I64] * 3)
    function = cgutils.get_or_insert_function(module, function_type, "numba_flash_log")
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        words, what, element, value = function.args

        def word(position):
            return builder.load(word_pointer(builder, words, position))

        logged = word(LOGGED)
        builder.store(builder.add(logged, constant(1)), word_pointer(builder, words, LOGGED))
        with builder.if_then(builder.icmp_signed("==", logged, word(LOG_LIMIT))):
            builder.store(constant(STOP_NOW), word_pointer(builder, words, STOP))
        with builder.if_then(builder.icmp_signed("<", logged, word(LOG_SIZE))):
            entry = builder.gep(builder.inttoptr(word(LOG), words_type), [builder.mul(logged, constant(ENTRY_WORDS))])
            when = builder.or_(builder.shl(word(PHASE), constant(32)), word(NOW_LINE))
            what = builder.or_(what, builder.shl(word(NOW_THREAD), constant(32)))
            for position, part in enumerate((when, what, element, value)):
                builder.store(part, word_pointer(builder, entry, position))
        builder.ret_void()
    return function


def log(context, builder, words, kind, site, tag, element, value=None, value_type=None):
    """Append an entry. A value that is no number of up to 64 bits, and one that is not known, is logged as 0."""
    is_float = isinstance(value_type, types.Float)
    if is_float:
        value = builder.bitcast(context.cast(builder, value, value_type, types.float64), I64)
    elif isinstance(value_type, (types.Integer, types.Boolean)):
        value = context.cast(builder, value, value_type, types.int64)
    else:
        value = constant(0)
    what = builder.or_(builder.shl(tag, constant(48)), constant(site << 3 | kind << 1 | is_float))
    builder.call(log_writer(builder.module, words.type), [words, what, element, value])


def log_access(context, builder, tensor_type, tensor, pointer, kind, site, value=None):
    """The entry of one access of one element: which one of its array, and what was read or written."""
    if tensor_type.recorded:
        itemsize = context.get_abi_sizeof(context.get_data_type(tensor_type.dtype))
        distance = builder.sub(builder.ptrtoint(pointer, I64), tensor.first)
        element, tag = builder.sdiv(distance, constant(itemsize)), builder.ashr(tensor.tag, constant(1))
        log(context, builder, tensor.state, kind, site, tag, element, value, value is not None and tensor_type.dtype)


@intrinsic(prefer_literal=True)
def note(typingctx, state, site, value):
    """In the log: `value` was assigned to the name that the program's `notes` have at `site`."""
    number, value_type = site.literal_value, types.unliteral(value)

    def codegen(context, builder, signature, arguments):
        words = struct_of(context, builder, state, arguments[0]).words
        log(context, builder, words, NOTE, number, constant(0), constant(0), arguments[2], value_type)
        return context.get_dummy_value()

    return types.void(state, site, value), codegen


@intrinsic(prefer_literal=True)
def mark(typingctx, state, line):
    """Entries from now on belong to this line of the kernel."""
    number = line.literal_value

    def codegen(context, builder, signature, arguments):
        words = struct_of(context, builder, state, arguments[0]).words
        builder.store(constant(number), word_pointer(builder, words, NOW_LINE))
        return context.get_dummy_value()

    return types.void(state, line), codegen


# --- strict mode ------------------------------------------------------------------------------------------------------


@register_jitable
def blame(state, kind, site, tag, element, other_site, other_block, other_thread):
    """Keep the first error; but a race explains why memory was read before it was written, so it replaces that."""
    if state[KIND] == 0 or (kind == RACE and state[KIND] == UNINITIALIZED and state[TENSOR] == tag):
        state[KIND], state[SITE], state[TENSOR], state[INDEX] = kind, site, tag, element
        state[BLOCK], state[THREAD] = state[NOW_BLOCK], state[NOW_THREAD]
        state[OTHER_SITE], state[OTHER_BLOCK], state[OTHER_THREAD] = other_site, other_block, other_thread
        state[STOP] = STOP_NOW if kind == RACE else STOP_SOON


def touch(state, shadow, element, tag, site, access):
    """Record one access of one element; a race, or a read of memory that nothing wrote, becomes the launch's error.

    A phase is the time between two barriers of one block. For each kind of access the element keeps the first thread of
    the current phase and the first block of the launch. That is enough, since threads and blocks run one after another:
    if the first is the one that asks, nobody else has been here.
    """
    base = element * SHADOW_WORDS
    block, thread, phase = state[NOW_BLOCK], state[NOW_THREAD], state[PHASE]
    if access != WRITE and shadow[base + WRITTEN] < 0:
        blame(state, UNINITIALIZED, site, tag, element, 0, 0, 0)
    if access != READ:
        shadow[base + WRITTEN] = 1
    for other in range(3):
        if access == other and access != WRITE:
            continue
        at = base + other * RECORD
        if shadow[at + EPOCH] == phase and shadow[at + THREAD_THEN] != thread:
            blame(state, RACE, site, tag, element, shadow[at + SITE_THEN], block, shadow[at + THREAD_THEN])
        if shadow[at + FIRST_BLOCK] >= 0 and shadow[at + FIRST_BLOCK] != block:
            blame(state, RACE, site, tag, element, shadow[at + FIRST_SITE], shadow[at + FIRST_BLOCK], -1)
    at = base + access * RECORD
    if shadow[at + EPOCH] != phase:
        shadow[at + EPOCH], shadow[at + THREAD_THEN], shadow[at + SITE_THEN] = phase, thread, site
    if shadow[at + FIRST_BLOCK] < 0:
        shadow[at + FIRST_BLOCK], shadow[at + FIRST_SITE] = block, site


# --- what a rewritten kernel calls ------------------------------------------------------------------------------------


def index_types(index):
    return list(index) if isinstance(index, types.BaseTuple) else [index]


def check_index(tensor, index):
    """A typing error for what cannot index a tensor; returns the index types, one an axis."""
    kinds = index_types(index)
    if len(kinds) > tensor.ndim:
        raise TypingError(f"{len(kinds)} indices for an array with {tensor.ndim} axes")
    for kind in kinds:
        if not isinstance(kind, (types.Integer, types.SliceType)):
            raise TypingError(f"an array is indexed with integers and slices, not with {kind}")
    return kinds


def is_element(tensor, kinds):
    return len(kinds) == tensor.ndim and all(isinstance(kind, types.Integer) for kind in kinds)


def unpack_index(context, builder, index_type, index):
    """The index as a list of int64 values (slices are kept as they are)."""
    kinds = index_types(index_type)
    values = cgutils.unpack_tuple(builder, index) if isinstance(index_type, types.BaseTuple) else [index]
    return [
        context.cast(builder, value, types.unliteral(kind), types.int64) if isinstance(kind, types.Integer) else value
        for kind, value in zip(kinds, values, strict=True)
    ]


def struct_of(context, builder, typ, value=None):
    return cgutils.create_struct_proxy(typ)(context, builder, value=value)


@intrinsic(prefer_literal=True)
def load(typingctx, container, index, site):
    """container[index]: an element of a tensor, a view of it, or an item of a tuple."""
    if isinstance(container, types.BaseTuple):
        return tuple_item(container, index, site)
    if not isinstance(container, TensorType):
        raise TypingError(f"{container} cannot be indexed")
    kinds = check_index(container, index)
    number = site.literal_value
    if is_element(container, kinds):

        def element(context, builder, signature, arguments):
            tensor = struct_of(context, builder, container, arguments[0])
            indices = unpack_index(context, builder, index, arguments[1])
            pointer = element_pointer(context, builder, container, tensor, indices, number, READ)
            value = context.unpack_value(builder, container.dtype, pointer)
            log_access(context, builder, container, tensor, pointer, READ, number, value)
            return value

        return container.dtype(container, index, site), element
    return view(container, index, site, kinds)


def tuple_item(container, index, site):
    if isinstance(index, types.IntegerLiteral):
        position = index.literal_value
        if not -container.count <= position < container.count:
            raise TypingError(f"index {position} of a tuple of {container.count}")
        item = container.types[position]
        return item(container, index, site), lambda context, builder, signature, arguments: builder.extract_value(
            arguments[0], position % container.count
        )
    if isinstance(container, types.UniTuple) and isinstance(index, types.Integer):

        def item(context, builder, signature, arguments):
            getitem = signature.return_type(container, index)
            return context.get_function(operator.getitem, getitem)(builder, arguments[:2])

        return container.dtype(container, index, site), item
    raise TypingError(f"a tuple is indexed with a constant integer, not with {index}")


def view(container, index, site, kinds):
    """A partial index: touches no memory, counts nothing, and counts like the tensor itself later on."""
    kept = [axis for axis in range(container.ndim) if axis >= len(kinds) or isinstance(kinds[axis], types.SliceType)]
    only_leading = not any(isinstance(kind, types.SliceType) for kind in kinds)
    result = container.view(len(kept), container.layout if only_leading else "A")

    def codegen(context, builder, signature, arguments):
        tensor = struct_of(context, builder, container, arguments[0])
        shape = cgutils.unpack_tuple(builder, tensor.shape)
        strides = byte_strides(context, builder, container, tensor)
        starts, sizes, steps = [], list(shape), list(strides)
        for axis, (kind, value) in enumerate(
            zip(kinds, unpack_index(context, builder, index, arguments[1]), strict=True)
        ):
            if isinstance(kind, types.SliceType):
                part = context.make_helper(builder, kind, value)
                slicing.guard_invalid_slice(context, builder, kind, part)
                slicing.fix_slice(builder, part, shape[axis])
                sizes[axis] = slicing.get_slice_length(builder, part)
                steps[axis] = builder.mul(strides[axis], part.step)
                starts.append(part.start)
            else:
                starts.append(value)
        starts_in_bounds = check_view(builder, tensor, kinds, starts, shape, site.literal_value)
        data = builder.bitcast(tensor.data, ir.IntType(8).as_pointer())
        for start, stride in zip(starts_in_bounds, strides, strict=False):
            data = builder.gep(data, [builder.mul(start, stride)])
        out = struct_of(context, builder, result)
        for name in context.data_model_manager[container]._fields:
            if name not in ("data", "shape", "strides"):
                setattr(out, name, getattr(tensor, name))
        out.data = builder.bitcast(data, tensor.data.type)
        out.shape = cgutils.pack_array(builder, [sizes[axis] for axis in kept], ty=I64)
        if result.layout == "A":
            out.strides = cgutils.pack_array(builder, [steps[axis] for axis in kept], ty=I64)
        return out._getvalue()

    return result(container, index, site), codegen


def byte_strides(context, builder, tensor_type, tensor):
    if tensor_type.layout == "A":
        return cgutils.unpack_tuple(builder, tensor.strides)
    strides = [constant(context.get_abi_sizeof(context.get_data_type(tensor_type.dtype)))]
    for size in reversed(cgutils.unpack_tuple(builder, tensor.shape)[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    return strides


def check_view(builder, tensor, kinds, starts, shape, site):
    """Integers in a partial index are checked as those of an element are; slices clip, as in Python."""
    checked = []
    for axis, (kind, start) in enumerate(zip(kinds, starts, strict=True)):
        if isinstance(kind, types.Integer):
            bad = builder.icmp_unsigned(">=", start, shape[axis])
            with builder.if_then(bad, likely=False):
                tag = builder.ashr(tensor.tag, constant(1))
                details = [constant(OUT_OF_BOUNDS), constant(site), tag, constant(axis), start, shape[axis]]
                builder.call(recorder(builder.module, tensor.state.type), [tensor.state, *details])
            start = builder.select(bad, constant(0), start)
        checked.append(start)
    return checked


@intrinsic(prefer_literal=True)
def store(typingctx, value, tensor, index, site):
    """tensor[index] = value, for one element."""
    if not isinstance(tensor, TensorType):
        raise TypingError(f"{tensor} cannot be assigned to by index")
    if not is_element(tensor, check_index(tensor, index)):
        raise TypingError("a whole row or slice cannot be assigned at once: write a loop over its elements")
    number = site.literal_value

    def codegen(context, builder, signature, arguments):
        struct = struct_of(context, builder, tensor, arguments[1])
        indices = unpack_index(context, builder, index, arguments[2])
        converted = context.cast(builder, arguments[0], types.unliteral(value), tensor.dtype)
        pointer = element_pointer(context, builder, tensor, struct, indices, number, WRITE)
        context.pack_value(builder, tensor.dtype, converted, pointer)
        log_access(context, builder, tensor, struct, pointer, WRITE, number, converted)
        return context.get_dummy_value()

    return types.void(value, tensor, index, site), codegen


@intrinsic(prefer_literal=True)
def cell(typingctx, tensor, index, site):
    """The element that an atomic operation works on, as a tensor of one element that is not counted again."""
    if not isinstance(tensor, TensorType) or not is_element(tensor, check_index(tensor, index)):
        raise TypingError("an atomic operation works on one element of an array: give one index for each axis")
    number = site.literal_value
    result = types.CPointer(tensor.dtype)

    def codegen(context, builder, signature, arguments):
        struct = struct_of(context, builder, tensor, arguments[0])
        indices = unpack_index(context, builder, index, arguments[1])
        pointer = element_pointer(context, builder, tensor, struct, indices, number, ATOMIC)
        log_access(context, builder, tensor, struct, pointer, ATOMIC, number)
        return pointer

    return result(tensor, index, site), codegen


@intrinsic
def stopped(typingctx, state):
    """True once an error was recorded or the learner pressed Ctrl-C."""

    def codegen(context, builder, signature, arguments):
        words = struct_of(context, builder, state, arguments[0]).words
        flag = builder.load_atomic(word_pointer(builder, words, STOP), "monotonic", 8)
        result = cgutils.alloca_once_value(builder, cgutils.false_bit)
        with builder.if_then(builder.icmp_signed("!=", flag, constant(RUN_ON)), likely=False):
            late = word_pointer(builder, words, LATE)
            turns = builder.add(builder.load(late), constant(1))
            builder.store(turns, late)
            too_late = builder.icmp_signed(">", turns, constant(PATIENCE))
            builder.store(builder.or_(too_late, builder.icmp_signed("==", flag, constant(STOP_NOW))), result)
        return builder.load(result)

    return types.boolean(state), codegen


@intrinsic
def poison(typingctx, tensor):
    """Fill a C-contiguous tensor with 0xFF bytes (NaN in every float type) and, in strict mode, forget its history."""

    def codegen(context, builder, signature, arguments):
        struct = struct_of(context, builder, tensor, arguments[0])
        elements = constant(1)
        for size in cgutils.unpack_tuple(builder, struct.shape):
            elements = builder.mul(elements, size)
        itemsize = context.get_abi_sizeof(context.get_data_type(tensor.dtype))
        cgutils.memset(builder, struct.data, builder.mul(elements, constant(itemsize)), 0xFF)
        if tensor.strict:
            distance = builder.sdiv(builder.sub(builder.ptrtoint(struct.data, I64), struct.base), constant(itemsize))
            shadow = builder.gep(struct.shadow, [builder.mul(distance, constant(SHADOW_WORDS))])
            cgutils.memset(builder, shadow, builder.mul(elements, constant(4 * SHADOW_WORDS)), 0xFF)
        return arguments[0]

    return tensor(tensor), codegen


@overload(len)
def tensor_len(tensor):
    if isinstance(tensor, TensorType):
        return lambda tensor: tensor.shape[0]


def attribute(name):
    def register(implementation):
        return overload_attribute(TensorType, name)(implementation)

    return register


@attribute("ndim")
def tensor_ndim(tensor):
    ndim = tensor.ndim
    return lambda tensor: ndim


@attribute("size")
def tensor_size(tensor):
    def size(tensor):
        product = 1
        for extent in tensor.shape:
            product *= extent
        return product

    return size


@attribute("itemsize")
def tensor_itemsize(tensor):
    itemsize = numpy_dtype(tensor.dtype).itemsize
    return lambda tensor: itemsize


@attribute("nbytes")
def tensor_nbytes(tensor):
    return lambda tensor: tensor.size * tensor.itemsize


@attribute("dtype")
def tensor_dtype(tensor):
    dtype = numpy_dtype(tensor.dtype)
    return lambda tensor: dtype


@attribute("strides")
def tensor_strides(tensor):
    return lambda tensor: strides_of(tensor)


@intrinsic
def strides_of(typingctx, tensor):
    def codegen(context, builder, signature, arguments):
        struct = struct_of(context, builder, tensor, arguments[0])
        return cgutils.pack_array(builder, byte_strides(context, builder, tensor, struct), ty=I64)

    return types.UniTuple(types.int64, tensor.ndim)(tensor), codegen
