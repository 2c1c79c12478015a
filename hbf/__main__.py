"""The program `hbf`, which `python -m hbf` runs too. It imports only the module of the command that is called."""

import runpy
import sys

import hbf
from hbf.errors import choose, fail, in_one_line

# Each command has a module and one line of help.
COMMANDS = {
  'train': ('hbf.cli.train', 'Train a network on images or texts, or continue a run.'),
  'eval': ('hbf.cli.evaluate', 'Evaluate a checkpoint of a run.'),
  'compare': ('hbf.cli.compare', 'Train several models alike, with several seeds, and write one table.'),
  'compile': ('hbf.cli.compile', 'Compile a config for absent hardware: memory, and an estimate of speed.'),
  'explain': ('hbf.cli.explain', 'Write a page that explains a run on images or texts.'),
  'predict': ('hbf.cli.predict', 'Classify images of your own.'),
  'serve': ('hbf.cli.serve', 'Classify images that are sent over HTTP, and show a page for that.'),
  'edit': ('hbf.cli.edit', 'Correct the answers for single images or prompts without training, or undo that.'),
  'learn': ('hbf.cli.learn', 'Add classes from a few images each without training, or undo that.'),
  'generate': ('hbf.cli.generate', 'Continue texts with the model of a run on texts.'),
  'pretrained': ('hbf.cli.pretrained', 'List the models that come with hbf, or make a run folder of one.'),
  'prepare': ('hbf.cli.prepare', 'Prepare a data set, such as cifar10.'),
  'export': ('hbf.cli.export', "Write a run's classifier to a folder for use elsewhere."),
  'convert': ('hbf.cli.convert', "Read weights of the memo's authors into a run, or write them."),
}


@in_one_line
def main() -> int:
  """Run the command that the first argument names; return the exit status."""
  name, *arguments = sys.argv[1:] or ['--help']
  if name in ('-h', '--help', 'help'):
    print(_help())
    return 0
  if name == '--version':
    print(f'hbf {hbf.__version__}')
    return 0
  if name.startswith('-'):
    return fail(f'{name} stands before a command: write `hbf COMMAND {name}`; `hbf --help` lists the commands')
  module, _ = choose('command', name, COMMANDS)
  sys.argv = [f'hbf {name}', *arguments]
  # This does the same as `python -m MODULE`.
  runpy.run_module(module, run_name='__main__')
  return 0


def _help() -> str:
  commands = '\n'.join(f'  {name:11}{about}' for name, (_, about) in COMMANDS.items())
  usage = 'hbf COMMAND [--flag=value …]'
  return '\n\n'.join((hbf.__doc__ or '', usage, commands, '`hbf COMMAND --help` lists the flags of a command.'))


if __name__ == '__main__':
  sys.exit(main())
