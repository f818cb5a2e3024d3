"""report.html of a real sweep, as a browser shows it on a desktop, on a phone, in dark mode, and on paper."""

import re
import shutil
import subprocess
import sys

import pytest
from browser import Browser
from launch import REPO, environment

from comparison.page import portable, write

SCRIPT = '<script>document.title="ours"</script>'
SWEEP = f"""
strategies = ['single']
sweep = {{'learning_rate': [1e-3, 1e-2, 1e5]}}
recipes = {{'plain': {{}}, 'odd': {{'wandb_run_name': '{SCRIPT}', 'arch': 'qwen3', 'n_experts': 4}}}}
seeds = [1]
at_once = 2
arch, n_layer, n_head, n_embd, block_size, batch_size = 'llama', 1, 2, 16, 16, 2
dataset, vocab_size, dtype = 'synthetic', 64, 'float32'
max_iters, log_interval, eval_sequences, warmup_iters, grad_clip = 12, 1, 16, 0, 0.0
device = 'cpu'
"""


@pytest.fixture(scope='module')
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp('report')
    (folder / 'sweep.py').write_text(SWEEP)
    command = [sys.executable, str(REPO / 'compare.py'), str(folder / 'sweep.py'), f'--out_dir={folder / "out"}']
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0 and 'report.html' in result.stdout, result.stdout + result.stderr
    return folder / 'out/report.html'


@pytest.fixture(scope='module')
def browser():
    if not shutil.which('chromium'):
        pytest.skip('no browser: bash tests/install_browser.sh, as root')
    with Browser() as browser:
        yield browser


ROWS = '[...document.querySelectorAll("table")].at(-2).tBodies[0].rows'  # of the runs


@pytest.mark.slow
@pytest.mark.parametrize('how', [{}, {'width': 390}, {'scheme': 'dark'}, {'width': 700, 'media': 'print'}], ids=str)
def test_a_browser_finds_no_error_no_address_and_nothing_that_is_too_wide(page, browser, tmp_path, how):
    browser.open(page, **how)
    assert browser.run('document.title') == 'Sweep: out'  # and not what a script in a key would make of it
    assert browser.errors == []
    assert all(address == page.as_uri() or address.startswith('data:') for address in browser.requests)
    assert browser.run('document.documentElement.scrollWidth') == how.get('width', 1200)
    outside = 'rect => rect.width > 0 && rect.right > innerWidth + 1'
    inside = '!e.closest(".wide")'  # .wide scrolls in its own box
    wide = f'[...document.body.querySelectorAll("*")].filter(e => {inside} && ({outside})(e.getBoundingClientRect()))'
    assert browser.run(f'{wide}.map(e => e.outerHTML)') == []
    assert browser.run('document.querySelector("svg text").getBoundingClientRect().height') > 6
    drawn = browser.run('document.querySelector("svg").getBoundingClientRect().width')
    assert drawn > 500
    browser.picture(tmp_path / 'page.png')
    assert (tmp_path / 'page.png').stat().st_size > 10_000


@pytest.mark.slow
def test_a_click_on_the_head_of_a_column_sorts_by_its_numbers_and_a_second_one_the_other_way(page, browser):
    browser.open(page)
    heads = browser.run(f'[...{ROWS}[0].closest("table").tHead.rows[0].cells].map(cell => cell.textContent)')
    column = heads.index('learning_rate')
    rates = f'[...{ROWS}].map(row => row.cells[{column}].textContent)'
    before = browser.run(rates)
    click = f'{ROWS}[0].closest("table").tHead.rows[0].cells[{column}].click()'
    browser.run(click)
    up = [float(rate) for rate in browser.run(rates)]
    assert up == sorted(float(rate) for rate in before) != [float(rate) for rate in before]
    browser.run(click)
    assert [float(rate) for rate in browser.run(rates)] == up[::-1]
    browser.run(f'{ROWS}[0].closest("table").tHead.rows[0].cells[{heads.index("val_loss")}].click()')
    losses = browser.run(f'[...{ROWS}].map(row => row.cells[{heads.index("val_loss")}].textContent)')
    known = [float(loss) for loss in losses if loss]
    assert known == sorted(known) and losses[: len(known)] == [loss for loss in losses if loss], 'empty cells are last'


@pytest.mark.slow
def test_the_report_says_what_runs_next_and_repeats_it_and_has_no_address(page):
    text = page.read_text()
    assert text.index('take learning_rate=') < text.index('<svg') < text.index('<table') < text.index('<pre>')
    assert text.count('<svg') == 2 and 'How evenly the experts are loaded' in text and 'tokens / mean' in text
    assert 'odd-lr100000.0/seed1' in text and 'torch ' in text
    assert SCRIPT not in text and SCRIPT.replace('<', '&lt;').replace('>', '&gt;').replace('"', '&quot;') in text
    assert not re.search(r'(src|href)="(?!data:|#)', text) and 'url(http' not in text and '@import' not in text
    assert str(page.parent) not in text.split('<h2>Commands')[1], 'no folder of this machine'
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_a_command_of_the_report_repeats_the_run_to_the_bit(page, tmp_path):
    text = page.read_text().split('<summary>plain-lr0.01/seed1</summary>')[1]
    command = re.sub('<[^>]*>', '', re.search('<pre>(.*?)</pre>', text)[1]).split()
    assert command[:2] == ['python', 'train_ddp.py'] and command[-1] == '--out_dir=out/again/plain-lr0.01/seed1'
    command = [sys.executable, *command[1:-1], f'--out_dir={tmp_path}']
    subprocess.run(command, cwd=REPO, env=environment(), check=True, capture_output=True)
    losses = [re.findall(r'"loss": ([\d.]+)', (out / 'metrics.jsonl').read_text())
              for out in (page.parent / 'runs/plain-lr0.01/seed1', tmp_path)]  # fmt: skip
    assert len(losses[0]) == 12 and losses[0] == losses[1]


def test_commands_of_several_ranks_and_of_odd_keys_can_be_typed():
    said = "python /home/me/lm/train_fsdp.py --a=1 '--out_dir=out/a b' --resume=must '--b=(1, 2)' (WORLD_SIZE=4)"
    wanted = "torchrun --nproc_per_node=4 train_fsdp.py --a=1 '--b=(1, 2)' --out_dir=out/again/x/rep0"
    assert portable(said, 'x/rep0') == wanted


def test_without_matplotlib_there_are_tables_and_one_line(tmp_path):
    (tmp_path / 'runs/a/rep0').mkdir(parents=True)
    (tmp_path / 'runs/a/rep0/FAILED').write_text('error: <i>')
    write(tmp_path, 'Sweep', ['a: <u>'], {'Best': [{'run': '<em>', 'loss': '1'}]}, {})
    text = (tmp_path / 'report.html').read_text()
    assert 'pip install matplotlib' in text and '<svg' not in text and '0 of 1 runs' in text
    for tag in ('i', 'u', 'em'):
        assert f'&lt;{tag}&gt;' in text and f'<{tag}>' not in text
