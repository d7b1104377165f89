"""python -m wakesight.cli: the same as the `wakesight` command."""

from wakesight.cli.main import main

main()
