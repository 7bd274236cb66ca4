"""The contract: what the services say to each other and keep at rest.

Pure data; imports nobody of ours.

events.py     every event on the bus, facts and decisions, as tagged msgspec structs
objects.py    the trimmed views of Kubernetes objects inside the facts
subjects.py   subject <-> identity, stream definitions
tables/       SQLAlchemy Core tables, one Postgres schema per service
migrations/   Alembic
crds/         the CustomResourceDefinitions
samples/      one JSON document per event version, decoded by the tests for ever
generated/    JSON Schemas and the AsyncAPI document, made from the structs
"""
