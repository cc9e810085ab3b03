"""Every stage on eight devices does what it does on one; see `on_meshes`.

DGR2_ALL_MESHES=1 runs every stage on every mesh, minutes on two cores.
"""

import os
import pathlib
import subprocess
import sys

MESHES = ('8.1.1', '1.8.1', '2.2.2', '1.1.8')
STAGES = 'ar_sft,ar_rl,cft,opd,rl'


def test_eight_devices_agree_with_one(tmp_path):
  wanted = [f'{mesh}:ar_sft' for mesh in MESHES] + [
      '2.2.2:cft,opd,rl', '1.8.1:teacher']
  if os.environ.get('DGR2_ALL_MESHES'):
    wanted = [f'{mesh}:{STAGES}' for mesh in MESHES] + ['1.8.1:teacher']
  result = subprocess.run(
      [sys.executable, '-m', 'tests.training.on_meshes', tmp_path, *wanted],
      cwd=pathlib.Path(__file__).parents[2], text=True, capture_output=True,
      check=False)
  assert result.returncode == 0, result.stderr[-3000:]
  told = result.stdout.splitlines()
  assert len(told) == sum(item.count(',') + 1 for item in wanted), told
