"""Commands in processes of their own, which are copies of one that has imported what they share."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
_SCRIPT = """
import json, os, runpy, sys, tempfile
import hbf.config.resolve

for path, *flags in json.loads(sys.argv[1]):
  said = [tempfile.TemporaryFile('w+') for _ in range(2)]
  child = os.fork()
  if not child:
    for number, file in enumerate(said, 1):
      os.dup2(file.fileno(), number)
    sys.argv = [path, *flags]
    runpy.run_path(path, run_name='__main__')
    sys.exit()
  status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  for file in said:
    file.seek(0)
  print(json.dumps([status, *(file.read() for file in said)]), flush=True)
"""


def run_each(commands):
  """Run scripts of the repository with flags. Return the status, stdout and stderr of each."""
  command = [sys.executable, '-c', _SCRIPT, json.dumps(commands)]
  done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
  return [json.loads(line) for line in done.stdout.splitlines()]
