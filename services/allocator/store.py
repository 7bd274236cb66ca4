"""The allocator's rows: load them into a state, save what changed. No rules."""

from services.allocator.loading import load
from services.allocator.saving import save

__all__ = ["load", "save"]
