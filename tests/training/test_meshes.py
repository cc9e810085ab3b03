"""Every stage on eight devices does what it does on one; see `on_meshes`.

DGR2_ALL_MESHES=1, as `make meshes` has it, runs every stage on every mesh.
"""

import os
import pathlib
import socket
import subprocess
import sys

MESHES = ('8.1.1', '1.8.1', '2.2.2', '1.1.8')
STAGES = 'mid_train,ar_sft,ar_rl,cft,cft+parts,cft+lora,opd,rl'


def _start(directory, *args):
  return subprocess.Popen(
      [sys.executable, '-m', 'tests.training.on_meshes', directory, *args],
      cwd=pathlib.Path(__file__).parents[2], text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _told(process):
  """What it said of the steps, if all agreed."""
  told, errors = process.communicate()
  assert process.returncode == 0, errors[-3000:]
  return [line for line in told.splitlines() if ' agrees' in line]


def test_eight_devices_agree_with_one_also_of_two_processes(tmp_path):
  wanted = [f'{mesh}:ar_sft' for mesh in MESHES] + [
      '2.2.2:cft,cft+parts,cft+lora,opd,rl', '1.8.1:teacher']
  shared = ['2.2.2:cft,rl']
  if os.environ.get('DGR2_ALL_MESHES'):
    wanted = [f'{mesh}:{STAGES}' for mesh in MESHES] + ['1.8.1:teacher']
    shared = [f'{mesh}:{STAGES}' for mesh in MESHES]
  count = lambda items: sum(item.count(',') + 1 for item in items)
  assert len(_told(_start(tmp_path, *wanted))) == count(wanted)
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  for process in [_start(tmp_path, f'--process={i}/2@{port}', *shared)
                  for i in range(2)]:
    assert len(_told(process)) == count(shared)
