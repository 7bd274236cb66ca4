"""The allocator's rows: load them into a state, take out what changed. No rules."""

from services.allocator.loading import load
from services.allocator.saving import take_changes

__all__ = ["load", "take_changes"]
