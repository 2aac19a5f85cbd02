"""How much shared memory a kernel may have, and how a multiprocessor divides its memory for it."""

from __future__ import annotations

from typing import Any

# Above so much dynamic shared memory a kernel's loads wait there; below, in registers and L1.
_STAGED_BYTES = 64 << 10
# Registers of a multiprocessor, and in how many of them threads get theirs.
_REGISTERS, _REGISTER_STEP = 64 << 10, 8
_DRIVERS_CHOICE = -1


def shared_carveout(shared_bytes: int, registers: int, threads: int) -> int:
    """Per cent of a multiprocessor's memory that are to be shared memory, the rest being L1.

    ``shared_bytes`` is what a launch asks for dynamically, ``registers`` are a thread's and
    ``threads`` a CTA's. −1 leaves it to the driver.

    A multiprocessor divides its memory only while it is idle, so a kernel that starts beside the
    one in front runs with that one's division. By the driver's choice a few multiprocessors read
    the vocabulary head with next to no L1, and a step waits for them. Kernels of which two CTAs
    share a multiprocessor stay with it: it knows how many are to fit.
    """
    if shared_bytes > _STAGED_BYTES:
        return 100
    of_a_cta = threads * -(-registers // _REGISTER_STEP) * _REGISTER_STEP
    return 0 if 2 * of_a_cta > _REGISTERS else _DRIVERS_CHOICE


def shared_attributes(driver: Any, shared_bytes: int, carveout: int) -> tuple[tuple[Any, int], ...]:
    """The attributes by which a driver's bindings are told of both, and their values.

    The first is said of small amounts too: 48 KiB without saying so are for static and dynamic
    shared memory together.
    """
    kinds = driver.CUfunction_attribute
    return (
        (kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
        (kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout),
    )
