"""Run `rotor-plan` by `python -m rotor_cli`."""

from rotor_cli.main import main

main()
