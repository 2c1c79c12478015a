"""Train a network: the same as `hbf train`, from a checkout."""

from hbf import cli
from hbf.cli.train import main

if __name__ == '__main__':
  cli.run(main)
