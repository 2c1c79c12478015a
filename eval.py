"""Evaluate a run: the same as `hbf eval`, from a checkout."""

from hbf import cli
from hbf.cli.evaluate import main

if __name__ == '__main__':
  cli.run(main)
