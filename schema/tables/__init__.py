"""All tables, one Postgres schema per service; importing this package fills `metadata`."""

import importlib

from schema.tables.base import SERVICES, metadata, mirror_table, service_tables

for _service in SERVICES:
    importlib.import_module(f"schema.tables.{_service}")

__all__ = ["SERVICES", "metadata", "mirror_table", "service_tables"]
