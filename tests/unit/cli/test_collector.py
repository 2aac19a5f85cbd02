"""Garbage collection is paused while a process starts, and resumed however the start ends."""

from __future__ import annotations

import gc

import pytest

from specbuild.cli.terminal.collector import starting


def test_objects_created_at_start_are_frozen() -> None:
    frozen_before = gc.get_freeze_count()
    try:
        with starting() as started:
            assert not gc.isenabled()
            started()
            assert gc.isenabled() and gc.get_freeze_count() > frozen_before
            frozen = gc.get_freeze_count()
        assert gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_a_failed_start_enables_the_collector() -> None:
    try:
        with pytest.raises(KeyError), starting():
            raise KeyError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with starting() as started:
            started()
            assert not gc.isenabled()
    finally:
        gc.enable()
