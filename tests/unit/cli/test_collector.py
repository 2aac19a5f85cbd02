"""The collector rests while a process starts, however the start ends."""

from __future__ import annotations

import gc

import pytest

from specbuild.cli.terminal.collector import starting


def test_what_a_start_makes_is_looked_through_no_more() -> None:
    kept = gc.get_freeze_count()
    try:
        with starting() as started:
            assert not gc.isenabled()
            started()
            assert gc.isenabled() and gc.get_freeze_count() > kept
            frozen = gc.get_freeze_count()
        assert gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_a_start_that_fails_leaves_the_collector_on() -> None:
    try:
        with pytest.raises(KeyError), starting():
            raise KeyError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_who_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with starting() as started:
            started()
            assert not gc.isenabled()
    finally:
        gc.enable()
