"""`python -m services.cli` is `lbledger`."""

from services.cli import main

main()
