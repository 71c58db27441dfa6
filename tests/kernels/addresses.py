"""Device functions built as on the GPU, with their thread as an unknown: the addresses that they
make, worked out for every thread of a warpgroup."""

import types

import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

I32, UNKNOWN = "i32", object()
THREAD = np.arange(128)
WARP, LANE = np.divmod(THREAD, 32)


def element(name):
    return {
        "e4m3": ir.Float8E4M3FNType.get,
        "bf16": ir.BF16Type.get,
        "f16": ir.F16Type.get,
        "f32": ir.F32Type.get,
        "i32": lambda: ir.IntegerType.get_signless(32),
        "i16": lambda: ir.IntegerType.get_signless(16),
    }[name]()


def memref(shape, dtype, strides):
    layout = ir.StridedLayoutAttr.get(0, strides)
    return ir.MemRefType.get(shape, element(dtype), layout)


def array(layout, shape, dtype, vector, known=()):
    """A register array, made of arguments; `known` are what they hold in each thread, if told."""
    return types.SimpleNamespace(
        layout=layout, shape=shape, dtype=dtype, vector=vector, known=known
    )


class Built:
    """A device function's loads and stores, its addresses those of all 128 threads.

    `function` calls that of `module`, which knows its thread by the name `warp_and_lane`, or asks
    for it as one of CTA `block` and its `warpgroup`. Loads of a word give what is in `memory`, if
    that is told.
    """

    def __init__(
        self,
        monkeypatch,
        function,
        arguments,
        module,
        warp_and_lane="warp_and_lane",
        block=0,
        warpgroup=0,
        memory=None,
    ):
        self.memory = memory
        self.numbers = {"thread_id": THREAD + 128 * warpgroup, "block_id": block + 0 * THREAD}
        captured = []

        def fake(*, return_type=None, **_):
            results = (None,) * len(return_type) if isinstance(return_type, tuple) else None
            return lambda f: lambda *_: captured.append(f) or results

        monkeypatch.setattr(module, "inline_mgpu", fake)
        function()
        (device,) = captured
        thread = lambda value: monkeypatch.setattr(module, warp_and_lane, lambda: value)
        self.module = ir.Module.create()
        with ir.InsertionPoint(self.module.body):
            self._build(monkeypatch, device, arguments, thread)

    def _build(self, monkeypatch, device, arguments, thread):
        i32 = element("i32")
        pointer = ir.Type.parse("!llvm.ptr")
        kinds, places = [i32, i32, pointer], []
        for argument in arguments:
            if isinstance(argument, tuple):
                kinds.append(memref(*argument))
                places.append(1)
                continue
            count = int(np.prod(argument.layout.to_mgpu().registers_shape(argument.shape)))
            kind = element(argument.dtype)
            if argument.vector:
                kind = ir.VectorType.get((argument.vector,), kind)
            kinds += [kind] * count
            places.append(count)
        f = func.FuncOp("f", ir.FunctionType.get(kinds, []))
        block = f.add_entry_block()
        warp, lane, base, *rest = block.arguments
        thread((warp, lane))
        monkeypatch.setattr(mgpu_utils, "memref_ptr", lambda *_: base)
        self.registers = {}
        values = []
        for argument, count in zip(arguments, places, strict=True):
            mine, rest = rest[:count], rest[count:]
            if isinstance(argument, tuple):
                values.append(mine[0])
                continue
            registers = np.empty(argument.layout.to_mgpu().registers_shape(argument.shape), object)
            registers.flat = mine
            signed = False if argument.dtype.startswith("i") else None
            values.append(
                FragmentedArray(
                    _registers=registers, _layout=argument.layout.to_mgpu(), _is_signed=signed
                )
            )
        with ir.InsertionPoint(block):
            self.result = device(None, *values)
            func.ReturnOp([])
        self.values = {warp: WARP, lane: LANE, base: np.zeros(128, int)}
        for argument, value in zip(arguments, values, strict=True):
            if not isinstance(argument, tuple) and argument.known:
                self.values |= zip(value.registers.flat, argument.known, strict=True)
        self.arguments, self.stores, self.loads, self.statements = values, [], {}, []
        self._run(block, np.ones(128, bool))

    def _run(self, block, active):
        for operation in block.operations:
            op = operation.operation
            get = lambda i, op=op: self.values.get(op.operands[i], UNKNOWN)
            binary = {
                "arith.addi": np.add,
                "arith.subi": np.subtract,
                "arith.muli": np.multiply,
                "arith.andi": np.bitwise_and,
                "arith.ori": np.bitwise_or,
                "arith.xori": np.bitwise_xor,
                "arith.shrui": np.right_shift,
                "arith.minui": np.minimum,
                "arith.minsi": np.minimum,
                "arith.maxui": np.maximum,
                "arith.maxsi": np.maximum,
            }
            if op.name == "arith.constant" and str(op.results[0].type) == I32:
                value = ir.IntegerAttr(op.attributes["value"]).value
                self.values[op.results[0]] = np.full(128, value)
            elif op.name in binary:
                if get(0) is not UNKNOWN and get(1) is not UNKNOWN:
                    self.values[op.results[0]] = binary[op.name](get(0), get(1))
            elif op.name in ("gpu.thread_id", "gpu.block_id"):
                self.values[op.results[0]] = self.numbers[op.name.removeprefix("gpu.")]
            elif op.name == "arith.index_cast":
                self.values[op.results[0]] = get(0)
            elif op.name == "arith.cmpi" and get(0) is not UNKNOWN:
                compare = {0: np.equal, 2: np.less, 3: np.less_equal, 4: np.greater}
                compare |= {5: np.greater_equal, 6: np.less}
                predicate = ir.IntegerAttr(op.attributes["predicate"]).value
                self.values[op.results[0]] = compare[predicate](get(0), get(1))
            elif op.name == "arith.select" and get(0) is not UNKNOWN and get(1) is not UNKNOWN:
                self.values[op.results[0]] = np.where(get(0), get(1), get(2))
            elif op.name == "vector.extract" and get(0) is not UNKNOWN:
                self.values[op.results[0]] = get(0)
            elif op.name == "llvm.getelementptr":
                static = list(ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
                kind = ir.TypeAttr(op.attributes["elem_type"]).value
                (index,) = static
                offset = get(1) if index == -(2**31) else index
                self.values[op.results[0]] = get(0) + offset * (mgpu_utils.bitwidth(kind) // 8)
            elif op.name == "llvm.load":
                self.loads[op.results[0]] = get(0), size(op.results[0].type)
                if self.memory is not None and str(op.results[0].type) == I32:
                    self.values[op.results[0]] = self.memory[get(0) // 4]
            elif op.name == "nvvm.ldmatrix":
                self.loads[op.results[0]] = get(0), 16
            elif op.name == "llvm.inline_asm" and len(op.operands):
                text = ir.StringAttr(op.attributes["asm_string"]).value
                self.statements.append((text, get(0), active))
            elif op.name == "llvm.store":
                self.stores.append((op.operands[0], get(1), active))
            elif op.name == "scf.if":
                self._run(op.regions[0].blocks[0], active & get(0))


def size(kind):
    return mgpu_utils.bitwidth(kind) // 8


def source(value):
    """The argument that a value is the bits of."""
    while not isinstance(value.owner, ir.Block):
        value = value.owner.operands[0]
    return value


def accumulator(shape):
    """The same of an accumulator: PTX's D fragment."""
    for block in range(shape[0] // 64):
        for group in range(shape[1] // 8):
            for half in range(2):
                rows = 64 * block + 16 * WARP + LANE // 4 + 8 * half
                yield (block, group, half), rows, 8 * group + LANE % 4 * 2


def in_order_of_keys(channels):
    """The channels `[..., n]` in the order in which `widen.load_keys` has the keys'."""
    places = channels.reshape(*channels.shape[:-1], -1, 4, 2, 2)
    return places.swapaxes(-2, -3).reshape(channels.shape)


def permuted(value):
    """The operands of the byte permutation that gave a value."""
    while "prmt" not in str(value.owner):
        value = value.owner.operands[0]
    return value.owner.operands


def swizzled(rows, columns, row_tile, column_tile, row_bytes, itemsize):
    """The byte of each element of a tiled matrix: TMA's swizzle, wgmma's canonical layout."""
    in_row = columns * itemsize
    tile, byte = in_row // row_bytes, in_row % row_bytes
    offset = rows % 8 * row_bytes + byte
    offset ^= (offset >> 7 & row_bytes // 16 - 1) << 4
    return rows // 8 * row_tile + tile * column_tile + offset
