"""No instruction is implemented without a test of its own."""

from __future__ import annotations

from . import test_faults, test_lanes, test_memory, test_salu, test_valu
from .coverage import TESTED
from .machine import CONTROL, DECODERS

_MODULES = (test_faults, test_lanes, test_memory, test_salu, test_valu)  # fill TESTED


def test_every_instruction_has_a_test() -> None:
    assert not {*DECODERS, *CONTROL} - TESTED
    assert not TESTED - {*DECODERS, *CONTROL}  # and every test tests something that exists
