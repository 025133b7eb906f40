"""Messages between the ranks of a job: sessions, turns, and exchanges of bytes."""

from .exchange import Exchange, open_exchange
from .interrupts import interrupts_allowed, interrupts_held
from .protocol import ALONE, Comm, SoloComm, merge_of_all, union, value_of_first
from .sessions import (
    ArgumentCheck,
    launched_group,
    open_session,
    open_session_by_name,
    open_turn,
    shared_store,
    values_of_all,
)
from .store import StoreComm, give_up_sessions
from .turns import CHANGED, FAILED, Turn

__all__ = [
    "ALONE",
    "CHANGED",
    "FAILED",
    "ArgumentCheck",
    "Comm",
    "Exchange",
    "SoloComm",
    "StoreComm",
    "Turn",
    "give_up_sessions",
    "interrupts_allowed",
    "interrupts_held",
    "launched_group",
    "merge_of_all",
    "open_exchange",
    "open_session",
    "open_session_by_name",
    "open_turn",
    "shared_store",
    "union",
    "value_of_first",
    "values_of_all",
]
