"""What the ranks of test_links.py run: all-reduces of two sizes; each leaves its rows in the folder it is given."""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import links

if __name__ == '__main__':
    rows = links.measure_links(torch.device('cpu'), [2**10, 2**22], seconds=0.1)
    Path(sys.argv[1], f'rank{os.environ["RANK"]}.json').write_text(json.dumps(rows))
