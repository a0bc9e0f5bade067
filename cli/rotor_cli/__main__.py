"""`python -m rotor_cli` is `rotor-plan`."""

from rotor_cli.main import main

main()
