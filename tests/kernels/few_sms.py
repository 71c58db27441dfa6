"""`mla_decode` as on a GPU of a few SMs, for the simulated one."""

from pallas_kernels import decode
from pallas_kernels.combine import kernel as combine
from pallas_kernels.hopper import plan


def limit_sms(monkeypatch, num_sms):
    for module in (plan, decode):
        monkeypatch.setattr(module, "num_sms", lambda: num_sms)
    monkeypatch.setattr(combine, "CTAS_PER_SM", 1)


def record_plan(monkeypatch):
    """A function that gives the plan of lengths as the last call of `mla_decode` has made it."""
    made = []

    def divide(seq_lens, **kwargs):
        made.append(kwargs)
        return plan.divide(seq_lens, **kwargs)

    monkeypatch.setattr(decode, "divide", divide)
    return lambda seq_lens: plan.divide(seq_lens, **made[-1])
