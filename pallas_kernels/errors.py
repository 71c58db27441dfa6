"""The one exception that carries a refusal."""


class Unsupported(NotImplementedError):
    """An implementation cannot serve this call; the message says which requirement failed.

    A kernel's entry raises it before any device code is traced, so that the caller can try another
    implementation.
    """
