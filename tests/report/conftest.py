"""Reports without their long measurements."""

import pytest

from paradec_jax.report import timing


@pytest.fixture(autouse=True)
def known_limits(monkeypatch):
    """Limits that are not measured, and loops that are not lengthened, so that tests take seconds."""
    limits = timing.Limits(1e10, 1e10, 2e10, 1e11)
    monkeypatch.setattr(timing, "limits", lambda dtype, weights=0, core=0, repeats=1: limits)
    monkeypatch.setattr(timing, "LEAST", 1e-6)
    timing.rough.cache_clear()
    yield
    timing.rough.cache_clear()
