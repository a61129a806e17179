"""Ctrl-C between any two steps of Python: at the places where the interpreter looks for it."""

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

LOOKS_BEFORE = {"RESUME", "JUMP_BACKWARD", "JUMP_BACKWARD_QUICK"}
LOOKS_AFTER = {"CALL", "CALL_FUNCTION_EX", "CALL_KW"}
LEFT_OUT = ("beartype", "jaxtyping", "weakref.py", __file__)
"""Files whose functions are not interrupted: what checks types in tests alone, and callbacks of the garbage collector,
where exceptions get lost."""
OPCODES: dict[Any, dict[int, str]] = {}


def run_interrupted(run: Callable[[], object], at: int | None = None) -> int:
    """Run something, and raise KeyboardInterrupt when the interpreter looks for interrupts for the `at`-th time.

    Returns:
        How often it has looked, if it has not been interrupted.
    """
    looked, last = 0, dict[int, str]()

    def look() -> None:
        nonlocal looked
        looked += 1
        if looked - 1 == at:
            sys.settrace(None)
            raise KeyboardInterrupt

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_name == "__del__" or any(part in code.co_filename for part in LEFT_OUT):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if code not in OPCODES:
                OPCODES[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
            name, before = OPCODES[code].get(frame.f_lasti, ""), last.pop(id(frame), "")
            last[id(frame)] = name
            if name in LOOKS_BEFORE or before in LOOKS_AFTER:
                look()
        elif event == "return":
            last.pop(id(frame), None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return looked


def interrupt(run: Callable[[], object], at: int) -> bool:
    """Interrupt something; False where it was done before the interpreter had looked so often."""
    try:
        looked = run_interrupted(run, at)
    except KeyboardInterrupt:
        return True
    assert looked <= at, "the interrupt got lost"
    return False
