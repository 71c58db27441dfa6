import jax
import jax.numpy as jnp
import pytest

from mla_jax import Unsupported, dispatch, mla_decode
from pallas_kernels.decode_dense import cost
from pallas_kernels.hopper.gpus import GPUS
from tests import inputs

NOT_BUILT = "not built yet for mla_decode"


def call(implementation, case=None):
    case = inputs.decode_case((3,)) if case is None else case
    return mla_decode(*case.args, scale=1.0, implementation=implementation)


@pytest.fixture
def kernel(monkeypatch):
    """A module that stands for a kernel under the name `mosaic`; it refuses pages of 16."""

    def mla_decode(q_latent, q_rope, cache, block_table, seq_lens, **kwargs):
        if cache.page_size == 16:
            raise Unsupported("takes pages of 64, `page_size` is 16")
        return q_latent * 0 + 7

    table = {"mosaic": "tests.kernel", "xla": dispatch.TABLE["mla_decode"]["xla"]}
    modules = {"tests.kernel": type("kernel", (), {"mla_decode": staticmethod(mla_decode)})}
    load = dispatch.importlib.import_module
    monkeypatch.setitem(dispatch.TABLE, "mla_decode", table)
    monkeypatch.setitem(dispatch._REQUIREMENTS, "mosaic", lambda: "")
    monkeypatch.setattr(
        dispatch.importlib, "import_module", lambda name: modules.get(name) or load(name)
    )


def test_the_best_that_can(kernel):
    assert (call(None, inputs.decode_case((3,), page_size=64)) == 7).all()
    assert not (call(None) == 7).any()


def test_a_sequence_is_tried_in_order(kernel):
    case = inputs.decode_case((3,), page_size=64)
    assert not (call(("xla", "mosaic"), case) == 7).any()
    assert (call(["triton", "mosaic", "xla"], case) == 7).all()


def test_a_named_one_never_falls_back(kernel):
    with pytest.raises(NotImplementedError) as raised:
        call("mosaic")
    assert str(raised.value) == (
        "`implementation` is 'mosaic': cannot serve this mla_decode call (mosaic: takes pages of "
        "64, `page_size` is 16); use implementation=None for the best that can"
    )


def test_every_refusal_is_named(kernel):
    with pytest.raises(Unsupported) as raised:
        call(("triton", "mosaic"))
    assert str(raised.value) == (
        f"`implementation` is ('triton', 'mosaic'): cannot serve this mla_decode call (triton: "
        f"{NOT_BUILT}; mosaic: takes pages of 64, `page_size` is 16); use implementation=None for "
        "the best that can"
    )


def test_explain_says_what_would_be_refused_and_runs_nothing(kernel):
    kwargs = {
        "scale": 1.0,
        "causal": True,
        "attn_sink": None,
        "plan": None,
        "return_lse": False,
    }
    reports = dispatch.explain("mla_decode", *inputs.decode_case((3,)).args, **kwargs)
    assert reports == (
        ("mosaic", False, "takes pages of 64, `page_size` is 16"),
        ("mosaic_transposed", False, NOT_BUILT),
        ("triton", False, NOT_BUILT),
        ("xla", True, ""),
    )
    assert dispatch.explain("mla_decode")[0] == ("mosaic", True, "")


def test_a_missing_device_is_named(kernel, monkeypatch):
    monkeypatch.setitem(dispatch._REQUIREMENTS, "mosaic", dispatch._lacks_hopper)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices(backend="cpu"))
    assert dispatch.explain("mla_decode")[0].reason == (
        "needs an NVIDIA Hopper GPU (compute capability 9.0), this process has: cpu"
    )


@pytest.fixture
def both_schedules(monkeypatch):
    """As if this process had a GPU, whose name is settable; a call says which schedule it got."""
    for name in ("mosaic", "mosaic_transposed"):
        monkeypatch.setitem(dispatch._REQUIREMENTS, name, lambda: "")
    taken = lambda *_, transposed=False, **__: transposed
    monkeypatch.setattr("pallas_kernels.decode.mla_decode", taken)

    def on(name):
        monkeypatch.setattr(dispatch, "gpu", lambda: GPUS[name])

    return on


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("format", ["bf16", "f16", "fp8_ds_mla", "fp8_token", "fp8_full"])
@pytest.mark.parametrize(
    ("h_q", "s_q"),
    [
        (1, 1),
        (8, 1),
        (16, 1),
        (16, 2),
        (24, 1),
        (32, 1),
        (11, 3),
        (16, 4),
        (64, 1),
        (13, 5),
        (80, 1),
        (24, 4),
        (128, 1),
    ],
)
def test_none_takes_the_schedule_that_is_predicted_to_be_faster(
    name, format, h_q, s_q, both_schedules
):
    both_schedules(name)
    dtype = jnp.float16 if format == "f16" else jnp.bfloat16
    case = inputs.decode_case((3,), h_q=h_q, s_q=s_q, format=format, dtype=dtype)
    predicted = cost.transposed_is_faster(GPUS[name], h=h_q, s_q=s_q, format=format)
    assert call(None, case) == predicted
    assert not call("mosaic", case) and call("mosaic_transposed", case)
    # In 16 bits, where memory bounds both, the transposed one must have less work by a margin.
    most = 16 if format in ("bf16", "f16") and name != "H20" else 32
    assert predicted == (h_q * s_q <= most)


def test_errors_of_an_import_are_not_swallowed(monkeypatch):
    monkeypatch.setitem(dispatch.TABLE, "mla_decode", {"xla": "mla_jax.no_such_module"})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        call(None)


def test_every_op_has_the_reference():
    for op, reports in dispatch.availability().items():
        assert [r.name for r in reports] == list(dispatch.IMPLEMENTATIONS)
        assert reports[-1] == ("xla", True, ""), op


@pytest.mark.parametrize(
    ("implementation", "error", "message"),
    [
        (
            "cuda",
            ValueError,
            "`implementation` is 'cuda': must be None, or one or several of 'mosaic', "
            "'mosaic_transposed', 'triton', 'xla'",
        ),
        (
            (),
            ValueError,
            "`implementation` is (): must be None, or one or several of 'mosaic', "
            "'mosaic_transposed', 'triton', 'xla'",
        ),
        (
            3,
            TypeError,
            "`implementation` is 3: must be None, a name or a sequence of names",
        ),
    ],
)
def test_wrong_names(implementation, error, message):
    with pytest.raises(error) as raised:
        call(implementation)
    assert str(raised.value) == message
