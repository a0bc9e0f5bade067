from collections import OrderedDict

import pytest

from rotor_py.capture import captured_forward


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every graph that is captured; nothing is known from other tests."""
    made: list[object] = []
    backend = captured_forward._backend
    monkeypatch.setattr(captured_forward, "_backend", lambda *given: made.append(0) or backend(*given))
    monkeypatch.setattr(captured_forward, "_compiled", OrderedDict())
    return made
