"""What the device functions of `hopper.dequantise` do, bit for bit.

The simulated GPU leaves them out. Here each is built as on the GPU and its operations are carried
out for all 128 threads at once, on the bytes of a shared memory: every load, every conversion and
the place of every store.
"""

import types

import ml_dtypes
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pallas_kernels.hopper import dequantise

THREADS = np.arange(128)
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
TOKENS = dequantise.TOKENS


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


def product(a, b):
    """Of pairs of bfloat16, rounded once, subnormal numbers included."""
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = (np.ascontiguousarray(x.astype(np.uint32)).view(BF16) for x in (a, b))
        a, b = (x.astype(np.float64) for x in pairs)
        return (a * b).astype(BF16).view(np.uint32)


def permute(a, b, selection):
    """PTX's prmt."""
    pool = np.stack([a >> 8 * i & 0xFF for i in range(4)] + [b >> 8 * i & 0xFF for i in range(4)])
    selection = int(selection[0])
    return sum(pool[selection >> 4 * i & 7] << 8 * i for i in range(4))


class Machine:
    """Runs a device function on 128 threads. Values are `[threads, elements]`, unsigned."""

    def __init__(self, monkeypatch, call, arguments, memories):
        captured = []
        fake = lambda **_: lambda f: lambda *_: captured.append(f)
        monkeypatch.setattr(dequantise, "inline_mgpu", fake)
        call()
        (device,) = captured
        i32, pointer = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.ptr")
        kinds = []
        for argument in arguments:
            if isinstance(argument, ir.Type):
                kinds.append(argument)
            else:
                kinds += [
                    ir.VectorType.get((x.shape[1],), i32) if x.ndim > 1 else i32
                    for x in argument[1]
                ]
        bases = [pointer] * len(memories)
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            f = func.FuncOp("f", ir.FunctionType.get([*bases, *kinds], []))
            block = f.add_entry_block()
            given, rest = list(block.arguments)[: len(bases)], list(block.arguments)[len(bases) :]
            self.values = dict(zip(given, memories, strict=True))
            values, refs = [], {}
            for argument in arguments:
                if isinstance(argument, ir.Type):
                    values.append(rest.pop(0))
                    refs[values[-1]] = given[len(refs)]
                    continue
                layout, known = argument
                registers = np.empty(layout.registers_shape, object)
                for i, x in enumerate(known):
                    registers.flat[i] = rest.pop(0)
                    self.values[registers.flat[i]] = x
                values.append(
                    FragmentedArray(_registers=registers, _layout=layout.layout, _is_signed=True)
                )
            monkeypatch.setattr(mgpu_utils, "memref_ptr", lambda ref: refs[ref])
            with ir.InsertionPoint(block):
                self.result = device(None, *values)
                func.ReturnOp([])
        self.warps_met = False
        """Since the last load."""
        for operation in block.operations:
            self.run(operation.operation)

    def registers(self):
        """Of each array that the function returns."""
        return [[self.values[x] for x in array.registers.flat] for array in self.result]

    def run(self, op):
        x = [self.values.get(operand) for operand in op.operands]
        result = self.evaluate(op, op.name, x)
        for value, found in zip(op.results, [result] if len(op.results) == 1 else [], strict=True):
            self.values[value] = found

    def evaluate(self, op, name, x):
        wrap = lambda x: x & 0xFFFFFFFF
        binary = {
            "arith.addi": lambda a, b: wrap(a + b),
            "arith.muli": lambda a, b: wrap(a * b),
            "arith.andi": np.bitwise_and,
            "arith.ori": np.bitwise_or,
            "arith.xori": np.bitwise_xor,
            "arith.shrui": np.right_shift,
            "arith.shli": lambda a, b: wrap(a << b),
        }
        if name in binary:
            return binary[name](*x)
        if name == "arith.constant":
            return np.full(128, wrap(ir.IntegerAttr(op.attributes["value"]).value))
        if name == "arith.cmpi":
            assert ir.IntegerAttr(op.attributes["predicate"]).value == 2  # signed, less than
            return x[0].astype(np.int32) < x[1].astype(np.int32)
        if name == "arith.select":
            return np.where(*x)
        if name == "vector.from_elements":
            return np.stack(x, axis=1)
        if name == "vector.extract":
            (position,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
            return x[0][:, position]
        if name == "llvm.extractvalue":
            (position,) = ir.DenseI64ArrayAttr(op.attributes["position"])
            return x[0][:, position]
        if name in ("llvm.bitcast", "arith.bitcast", "vector.bitcast"):
            return x[0]
        if name == "llvm.getelementptr":
            (index,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
            scale = mgpu_utils.bitwidth(ir.TypeAttr(op.attributes["elem_type"]).value) // 8
            return x[0].at(scale * (x[1] if index == -(2**31) else index))
        if name == "nvvm.bar.warp.sync":
            self.warps_met = True
            return None
        if name == "llvm.load":
            self.warps_met = False
            kind = op.results[0].type
            words = kind.shape[0] if isinstance(kind, ir.VectorType) else 1
            found = x[0].load(words)
            return found if words > 1 else found[:, 0]
        if name == "llvm.inline_asm":
            return self.assembly(ir.StringAttr(op.attributes["asm_string"]).value, x)
        if name == "llvm.store":
            assert x[0].shape == (128, 4)
            return x[1].store(x[0])
        assert name == "func.return", op
        return None

    def assembly(self, text, x):
        if "%tid.x" in text:
            return THREADS + 256  # it is the third warpgroup of its block
        if text.startswith("mul.rn.bf16x2"):
            return product(*x)
        assert text.startswith("prmt.b32"), text
        return permute(*x)


class Memory:
    """Bytes, and an address in them for every thread; which warps have read and written them."""

    def __init__(self, bytes, address=0, marks=None):
        self.bytes, self.address = bytes, np.broadcast_to(address, 128)
        self.read_by, self.written_by, self.written = marks or (
            np.full(bytes.size, -1),
            np.full(bytes.size, -1),
            np.zeros(bytes.size, int),
        )

    def at(self, offset):
        marks = self.read_by, self.written_by, self.written
        return Memory(self.bytes, self.address + offset, marks)

    def places(self, words):
        assert (self.address % (4 * words) == 0).all()
        if words == 4:
            # A warp's access takes its least time if each eight lanes meet every bank once.
            banks = np.sort(self.address.reshape(-1, 8) % 128, axis=1)
            assert (banks == np.arange(0, 128, 16)).all()
        return self.address[:, None] + np.arange(4 * words)

    def load(self, words):
        places = self.places(words)
        self.read_by[places] = THREADS[:, None] // 32
        found = np.ascontiguousarray(self.bytes[places]).view(np.uint32)
        return found.astype(np.int64)

    def store(self, words):
        places = self.places(4)
        self.bytes[places] = words.astype(np.uint32).view(np.uint8)
        self.written_by[places] = THREADS[:, None] // 32
        np.add.at(self.written, places, 1)


def tiled(columns, element):
    """The type of 64 rows that are swizzled by 128 bytes."""
    width = 1024 // mgpu_utils.bitwidth(element)
    strides = ir.StridedLayoutAttr.get(0, [8 * columns, 8 * width, width, 1])
    return ir.MemRefType.get((8, columns // width, 8, width), element, strides)


def shaped(*shape):
    return types.SimpleNamespace(shape=shape)


def convert(monkeypatch, latents, scales, first, live):
    """Both halves of the rows that come of these, as bytes of tiles of 64 rows; the raw tile has
    been where the left one is."""
    d_latent = latents.shape[1]
    d_half = d_latent // 2
    raw = np.full((64, d_latent), 0xFF, np.uint8)
    raw[first : first + TOKENS] = latents.view(np.uint8)
    left = Memory(np.zeros(64 * d_latent, np.uint8))
    left.bytes[swizzled(d_latent)] = raw.reshape(-1)
    right = Memory(np.full(64 * d_latent, 0xAA, np.uint8))

    call = lambda: dequantise.load_latents(shaped(64, d_latent), first, interpret=False)
    loaded = Machine(monkeypatch, call, [tiled(d_latent, ir.Float8E4M3FNType.get())], [left])
    assert loaded.warps_met

    layout = plgpu.Layout.WG_STRIDED((TOKENS, d_half // 4), vec_size=4).to_mgpu()
    strided = lambda known: (
        types.SimpleNamespace(layout=layout, registers_shape=(len(known),)),
        known,
    )
    splat = (
        types.SimpleNamespace(layout=plgpu.Layout.WG_SPLAT(()).to_mgpu(), registers_shape=()),
        [np.full(128, live & 0xFFFFFFFF)],
    )
    of_scales = ir.MemRefType.get((1, scales.size), ir.F32Type.get())
    memory_of_scales = Memory(np.ascontiguousarray(scales).reshape(-1).view(np.uint8))
    call = lambda half: (
        lambda: dequantise.store_bf16(
            shaped(64, d_half), half, first, None, None, None, interpret=False
        )
    )
    for half, (memory, words) in enumerate(zip((left, right), loaded.registers(), strict=True)):
        arguments = [tiled(d_half, ir.BF16Type.get()), strided(words), of_scales, splat]
        Machine(monkeypatch, call(half), arguments, [memory, memory_of_scales])
    replaced = left.written_by >= 0
    np.testing.assert_array_equal(left.read_by[replaced], left.written_by[replaced])
    return left, right


def swizzled(row_bytes):
    """The place of every byte of 64 rows in a tile that is swizzled by 128 bytes."""
    row, byte = np.divmod(np.arange(64 * row_bytes), row_bytes)
    at = row // 8 * 8 * row_bytes + byte // 128 * 1024 + row % 8 * 128 + byte % 128
    return at ^ (at >> 7 & 7) << 4


def natural(memory, d_half):
    """The rows of a tile that is swizzled by 128 bytes, and how often each byte was written."""
    rows = lambda x: x[swizzled(2 * d_half)].reshape(64, d_half * 2)
    return rows(memory.bytes).view(BF16), rows(memory.written)


def expected(latents, scales):
    values = latents.astype(np.float64) * np.repeat(scales.astype(np.float64), 128, axis=1)
    with np.errstate(over="ignore"):
        return values.astype(BF16)


def check(monkeypatch, latents, scales, first=0, live=64):
    d_half = latents.shape[1] // 2
    wanted = expected(latents, scales)
    alive = first + np.arange(TOKENS) < live
    wanted = np.where(alive[:, None], wanted.view(np.uint16), 0)
    for half, memory in enumerate(convert(monkeypatch, latents, scales, first, live)):
        found, written = natural(memory, d_half)
        rows = slice(first, first + TOKENS)
        assert (written[rows] == 1).all() and written.sum() == TOKENS * d_half * 2
        bits = found[rows].view(np.uint16)
        # A dead row's zeros have any sign.
        bits = np.where(alive[:, None], bits, bits & 0x7FFF)
        np.testing.assert_array_equal(bits, wanted[:, half * d_half : (half + 1) * d_half])


def codes(rng, d_latent):
    """Every e4m3 but its NaNs, several times."""
    finite = np.array([x for x in range(256) if x & 0x7F != 0x7F], np.uint8)
    filled = np.resize(finite, TOKENS * d_latent)
    return rng.permutation(filled).reshape(TOKENS, d_latent).view(E4M3)


@pytest.mark.parametrize("first", [0, 32])
@pytest.mark.parametrize("d_latent", [512, 256])
def test_every_element_finds_its_place(d_latent, first, monkeypatch):
    rng = np.random.default_rng(first)
    scales = 2.0 ** rng.integers(-20, 21, (TOKENS, d_latent // 128))
    check(monkeypatch, codes(rng, d_latent), scales.astype(np.float32), first)


@pytest.mark.parametrize("start", range(-126, 128, 64))
def test_all_codes_at_all_scales(start, monkeypatch):
    """From the least normal float32: infinity where bfloat16 ends, as in any other conversion."""
    scales = 2.0 ** np.minimum(start + np.arange(128).reshape(TOKENS, 4) % 64, 127)
    every = np.resize(np.arange(256, dtype=np.uint8), 128)
    low, high = (np.resize(every + shift, 128) for shift in (0, 128))
    row = np.concatenate([low, high, low, high]).astype(np.uint8)
    latents = np.tile(np.where(row & 0x7F == 0x7F, 0, row).astype(np.uint8), (TOKENS, 1)).view(E4M3)
    for shift in (0, 1):  # each scale meets both halves of the codes
        rolled = np.roll(latents.view(np.uint8), 128 * shift, axis=1).view(E4M3)
        check(monkeypatch, rolled, scales.astype(np.float32))


@pytest.mark.parametrize("live", [-64, 0, 1, 33, 46, 63, 64])
@pytest.mark.parametrize("d_latent", [512, 256])
def test_dead_rows_are_zero_whatever_they_hold(d_latent, live, monkeypatch):
    latents = codes(np.random.default_rng(0), d_latent).view(np.uint8)
    scales = np.ones((TOKENS, d_latent // 128), np.float32)
    dead = 32 + np.arange(TOKENS) >= live
    latents[dead] |= 0x7F
    scales[dead] = np.resize([np.nan, np.inf, -np.inf, 3e38], scales[dead].shape)
    check(monkeypatch, latents.view(E4M3), scales, 32, live)


def test_nan():
    """One of `append`'s is an infinity, for it has a scale of 2**120; any other is 480."""
    word = np.array([0xFF7F], np.uint32)
    spread = (word & 0x7F) << 4 | (word >> 8 & 0x7F) << 20 | 0x80000000
    exact = product(spread, np.array([0x7B807B80]))
    np.testing.assert_array_equal(exact.view(BF16), np.array([480, -480], BF16))
    scale = np.array([0x7B807B80])
    np.testing.assert_array_equal(
        product(exact, scale).view(BF16), np.array([np.inf, -np.inf], BF16)
    )
