"""Errors, warnings and log records carry fields, wherever they are raised."""

import copy
import logging
import pickle
import warnings

import pytest

from rotor_py import errors
from rotor_solver import DescribedError, InfeasibleError, InvalidStateError, InvalidTypeError, InvalidValueError
from tests.fields import kinds, logged, raises, warns

BUILTINS = {
    InvalidValueError: ValueError,
    InvalidTypeError: TypeError,
    InvalidStateError: RuntimeError,
    errors.UnsupportedModelError: ValueError,
    errors.OffloadError: RuntimeError,
}
MADE = (
    InvalidValueError("slots must be one or more, got 0", kind="not_a_count", name="slots", got=0),
    InfeasibleError("too small", min_bytes=7, mem_limit=5, stage=2),
    errors.UnsupportedModelError("no gradient", name="model"),
    errors.PlanMismatchError("keep=", "bf16", None),
    errors.CheckpointLimitError(3, 2),
    errors.MissingCheckpointError(4),
    errors.DescribedWarning("no effect", kind="no_effect"),
)


@pytest.mark.parametrize("error", MADE, ids=lambda error: error.kind)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_has_the_class_message_and_fields(error, copied):
    other = copied(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert other.__dict__ == error.__dict__


def test_errors_keep_their_builtin_classes_an_infeasible_limit_has_two_and_fields_have_defaults():
    assert all(issubclass(described, builtin) for described, builtin in BUILTINS.items())
    with raises(ValueError, "limit_too_small", stage=2, min_bytes=7, mem_limit=5) as caught:
        raise MADE[1]
    assert isinstance(caught.value, RuntimeError)
    error = InvalidValueError("wrong")
    assert (error.kind, error.stage, error.name, error.numbers) == ("invalid", None, None, {})
    assert errors.fields_of(KeyError("x"))["kind"] == "KeyError"


def test_log_records_and_warnings_carry_the_fields_and_a_wrong_field_fails_the_check(caplog):
    log = logging.getLogger("rotor_py")
    log.warning("%d of %d", 1, 2, extra=errors.record_fields("odd", stage=4, name="a", first=1))
    log.warning("again", extra=errors.fields_of(MADE[1]))
    log.warning("without fields")
    assert kinds(caplog) == ["odd", "limit_too_small"]
    (record,) = logged(caplog, "odd", stage=4, name="a", first=1)
    assert (record.stage, record.subject, record.numbers) == (4, "a", {"first": 1})
    assert logged(caplog, "limit_too_small", min_bytes=7)
    assert not logged(caplog, "odd", first=2)
    with warns("no_effect"):
        warnings.warn(MADE[-1], stacklevel=1)
    with pytest.raises(AssertionError), raises(DescribedError, "not_a_count", got=1):
        raise MADE[0]
    with pytest.raises(AssertionError), raises(DescribedError, "other"):
        raise MADE[0]
