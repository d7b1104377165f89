"""python -m wakesight: the same as the `wakesight` command."""

from wakesight.cli.main import main

main()
