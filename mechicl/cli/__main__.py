"""`python -m mechicl.cli`, for where the `mechicl` script is not on the path."""

from mechicl.cli import main

main()
