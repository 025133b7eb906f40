"""The fixtures of the memory tier's tests, for managers with one."""

from tests.memory.conftest import shm

__all__ = ["shm"]
