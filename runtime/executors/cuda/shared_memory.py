"""The shared memory of a kernel, and the division of a multiprocessor's memory for it."""

from __future__ import annotations

from typing import Any

# With more dynamic shared memory than this, a kernel stages loads there; with less, in registers
# and L1.
_STAGED_BYTES = 64 << 10
# The registers of a multiprocessor, and the granularity of their allocation to threads.
_REGISTERS, _REGISTER_STEP = 64 << 10, 8
_DRIVERS_CHOICE = -1


def shared_carveout(shared_bytes: int, registers: int, threads: int) -> int:
    """Return the per cent of a multiprocessor's memory for shared memory; the rest is L1.

    ``shared_bytes`` is a launch's dynamic shared memory, ``registers`` are per thread, and
    ``threads`` per CTA. −1 leaves the choice to the driver.

    A multiprocessor divides its memory only while it is idle, so a kernel that starts beside the
    previous one runs with the division of that one. With the driver's choice a few multiprocessors
    read the vocabulary head with almost no L1, and a step waits for them. Kernels with two CTAs per
    multiprocessor keep the driver's choice, which knows how many fit.
    """
    if shared_bytes > _STAGED_BYTES:
        return 100
    of_a_cta = threads * -(-registers // _REGISTER_STEP) * _REGISTER_STEP
    return 0 if 2 * of_a_cta > _REGISTERS else _DRIVERS_CHOICE


def shared_attributes(driver: Any, shared_bytes: int, carveout: int) -> tuple[tuple[Any, int], ...]:
    """Return the attributes of a driver's bindings for both, and their values.

    The first is always set: the default of 48 KiB includes static shared memory.
    """
    kinds = driver.CUfunction_attribute
    return (
        (kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
        (kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout),
    )
